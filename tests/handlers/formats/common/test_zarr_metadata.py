from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest
import tensorstore

from penstock.errors import CorruptCheckpointError, UnsupportedFormatError
from penstock.handlers.dtypes import dtype_name, numpy_dtype
from penstock.handlers.formats import zarr

ts = cast("Any", tensorstore)

V2: dict[str, Any] = {
    "chunks": [2, 3],
    "compressor": None,
    "dimension_separator": ".",
    "dtype": "<f4",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [4, 3],
    "zarr_format": 2,
}
V3: dict[str, Any] = {
    "chunk_grid": {"configuration": {"chunk_shape": [2, 3]}, "name": "regular"},
    "chunk_key_encoding": {"name": "default"},
    "codecs": [{"configuration": {"endian": "little"}, "name": "bytes"}],
    "data_type": "float32",
    "fill_value": 0.0,
    "node_type": "array",
    "shape": [4, 3],
    "zarr_format": 3,
}


def written_by_tensorstore(
    driver: str, dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], **metadata: Any
) -> dict[str, bytes]:
    """Have TensorStore write an array of ones, and return everything it stored."""
    if driver == "zarr":
        metadata = {"shape": shape, "chunks": chunks, "compressor": None, **metadata}
    else:
        grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
        metadata = {"shape": shape, "chunk_grid": grid, **metadata}

    context = ts.Context()
    spec = {"driver": driver, "kvstore": "memory://", "metadata": metadata, "dtype": dtype}
    array = ts.open(spec, create=True, context=context).result()
    array.write(np.ones(shape, numpy_dtype(dtype))).result()
    stored = ts.KvStore.open("memory://", context=context).result()
    return {key.decode(): stored.read(key).result().value for key in stored.list().result()}


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float32", "bfloat16", "int4", "complex128"])
@pytest.mark.parametrize(
    ("shape", "chunks"), [((), ()), ((5,), (5,)), ((4, 6), (2, 3)), ((0, 3), (1, 3)), ((1,) * 20, (1,) * 20)]
)
def test_encode_v2_writes_the_bytes_that_tensorstore_writes(
    dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    stored = written_by_tensorstore("zarr", dtype, shape, chunks)

    assert zarr.encode_v2(shape, dtype, chunks) == stored[".zarray"]


@pytest.mark.parametrize("dtype", ["bool", "int16", "float64", "bfloat16", "float8_e5m2", "complex64"])
@pytest.mark.parametrize(("driver", "version"), [("zarr", 2), ("zarr3", 3)])
@pytest.mark.parametrize(("shape", "chunks"), [((), ()), ((4, 6), (2, 3)), ((5,), (2,))])
def test_decode_understands_plain_arrays_of_tensorstore(
    driver: str, version: int, dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    stored = written_by_tensorstore(driver, dtype, shape, chunks)

    found = zarr.decode("where", stored.pop(zarr.METADATA_KEYS[version - 2]))

    assert (found.shape, found.chunk_shape, found.version) == (shape, chunks, version)
    assert (found.dtype, found.itemsize) == (dtype, numpy_dtype(dtype).itemsize)
    assert found.plain
    indices = np.ndindex(found.grid_shape)
    assert {found.chunk_key(index) for index in indices} == set(stored)
    assert {len(data) for data in stored.values()} == {found.itemsize * int(np.prod(chunks))}


@pytest.mark.parametrize(
    ("driver", "metadata", "plain"),
    [
        ("zarr", {"compressor": {"id": "zstd", "level": 1}}, False),
        ("zarr", {"order": "F"}, False),
        ("zarr", {"dimension_separator": "/"}, True),
        ("zarr3", {"chunk_key_encoding": {"name": "v2"}}, True),
        ("zarr3", {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}}}, True),
        ("zarr3", {"codecs": ["bytes", {"name": "zstd", "configuration": {"level": 1}}]}, False),
        ("zarr3", {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]}, False),
        (
            "zarr3",
            {"codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 3]}}]},
            False,
        ),
    ],
)
def test_only_raw_little_endian_row_major_chunks_are_plain(
    driver: str, metadata: dict[str, Any], plain: bool
) -> None:
    stored = written_by_tensorstore(driver, "int16", (4, 6), (2, 3), **metadata)

    found = zarr.decode("where", stored.pop(".zarray" if driver == "zarr" else "zarr.json"))

    assert found.plain is plain
    assert {found.chunk_key(index) for index in np.ndindex(found.grid_shape)} == set(stored)


def test_a_numpy_dtype_of_the_other_byte_order_keeps_its_name() -> None:
    found = zarr.decode("where", json.dumps(V2 | {"dtype": ">f4"}).encode())

    assert found.dtype == dtype_name(np.dtype("f4"))
    assert not found.plain


def test_chunks_need_not_divide_the_shape() -> None:
    found = zarr.decode("where", json.dumps(V2 | {"shape": [5, 3]}).encode())

    assert found.grid_shape == (3, 1)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", r"the document is \[\], not an object"),
        (b"{}", "zarr_format is None"),
        (b'{"zarr_format": true}', "zarr_format is True"),
        (b'{"zarr_format": 4}', "zarr_format is 4"),
    ],
)
def test_what_is_no_metadata_at_all_is_corrupt(data: bytes, problem: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"^where: .*{problem}"):
        zarr.decode("where", data)


WRONG: list[Any] = [None, True, -1, 1.5, "x", [], [1], [-1, 1], ["x", "y"], [True, 1], {}, {"name": 3}]


@pytest.mark.parametrize("document", [V2, V3], ids=["v2", "v3"])
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_member_of_the_wrong_type_is_corrupt_or_harmless(document: dict[str, Any], wrong: Any) -> None:
    for member in document:
        data = json.dumps(document | {member: wrong}).encode()
        try:
            found = zarr.decode("where", data)
        except CorruptCheckpointError:
            continue

        # What decodes has not lost what decoding needs.
        assert len(found.shape) == len(found.chunk_shape) == 2
        assert member in {"fill_value", "compressor", "filters", "codecs"}


@pytest.mark.parametrize("document", [V2, V3], ids=["v2", "v3"])
def test_a_missing_member_is_corrupt_unless_it_has_a_default(document: dict[str, Any]) -> None:
    optional = {"compressor", "dimension_separator", "fill_value", "filters", "order"}
    for member in document.keys() - optional:
        data = json.dumps({name: value for name, value in document.items() if name != member}).encode()
        with pytest.raises(CorruptCheckpointError):
            zarr.decode("where", data)


def test_a_chunk_of_no_size_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpointError, match="axis of 0"):
        zarr.decode("where", json.dumps(V2 | {"chunks": [0, 3]}).encode())


@pytest.mark.parametrize(
    "document",
    [
        V2 | {"dtype": [["x", "<f4"]]},
        V2 | {"dtype": "|S3"},
        V3 | {"data_type": "r16"},
        V3 | {"chunk_grid": {"name": "rectilinear"}},
        V3 | {"chunk_key_encoding": {"name": "suffix"}},
    ],
)
def test_what_zarr_allows_and_penstock_does_not_read_is_named_so(document: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormatError):
        zarr.decode("where", json.dumps(document).encode())
