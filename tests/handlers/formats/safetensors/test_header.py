"""The header of a file that may come from anywhere: accepted, or refused by a named error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptCheckpointError, PenstockError, TruncatedDataError, UnsupportedFormatError
from penstock.handlers import LocalStore
from penstock.handlers.formats.safetensors.header import (
    CODES,
    MAX_HEADER_BYTES,
    NAMES,
    PACKED,
    FileHeader,
    Tensor,
    encode_header,
    read_header,
)
from penstock.testing import FaultyStore


def entry(dtype: str = "U8", shape: Any = (1,), begin: Any = 0, end: Any = 1) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def read(tmp_path: Path, content: bytes) -> FileHeader:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    store = FaultyStore(LocalStore())
    try:
        return read_header(store, str(path))
    finally:
        assert store.open_files == 0


def test_a_plain_file(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", (2, 3), 4, 16),
        "a": entry("F32", (), 0, 4),
        "none": entry("F64", (0, 5), 16, 16),
    }

    found = read(tmp_path, file_of(header, bytes(16)))

    start = 8 + len(json.dumps(header))
    assert found.metadata == {"format": "pt"}
    assert found.tensors == (
        Tensor("b", "bfloat16", (2, 3), start + 4, 12),
        Tensor("a", "float32", (), start, 4),
        Tensor("none", "float64", (0, 5), start + 16, 0),
    )


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"{}      ",
        b' {"__metadata__": null}',
        b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
    ],
)
def test_a_file_without_data(tmp_path: Path, header: bytes) -> None:
    assert all(not tensor.nbytes for tensor in read(tmp_path, file_of(header)).tensors)


def test_unknown_members_of_a_tensor_are_passed_over(tmp_path: Path) -> None:
    assert len(read(tmp_path, file_of({"a": {**entry(), "more": [1]}}, b"x")).tensors) == 1


HOSTILE: dict[str, tuple[bytes, str]] = {
    "no JSON": (file_of(b"{"), "not JSON"),
    "empty header": (file_of(b""), "not JSON"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "not JSON"),
    "UTF-16": (file_of('{"a": 1}'.encode("utf-16")), "not JSON"),
    "deep": (file_of(b'{"a":' * 100_000), "not JSON"),
    "a list": (file_of([]), "not an object"),
    "a huge number": (file_of(b'{"a": 1' + b"0" * 5000 + b"}"), "not JSON"),
    "a name twice": (
        file_of(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), b"x"),
        "'a' occurs twice",
    ),
    "a member twice": (file_of(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), "'dtype' occurs twice"),
    "a lone surrogate": (file_of({"\ud800": entry()}, b"x"), "no valid Unicode"),
    "metadata no map": (file_of({"__metadata__": [1]}), "__metadata__"),
    "metadata no text": (file_of({"__metadata__": {"k": 1}}), "'k'"),
    "a tensor no object": (file_of({"a": 3}), "not an object"),
    "no dtype": (file_of({"a": {"shape": [], "data_offsets": [0, 1]}}, b"x"), "missing"),
    "dtype no text": (file_of({"a": {**entry(), "dtype": 8}}, b"x"), "the dtype of 'a'"),
    "no shape": (file_of({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"), "the shape of 'a'"),
    "negative shape": (file_of({"a": entry(shape=(-1, -1))}, b"x"), "list of sizes"),
    "fractional shape": (file_of({"a": entry(shape=(1.0,))}, b"x"), "list of sizes"),
    "true in a shape": (file_of({"a": entry(shape=(True,))}, b"x"), "list of sizes"),
    "no offsets": (file_of({"a": {"dtype": "U8", "shape": [1]}}, b"x"), "the data_offsets of 'a'"),
    "one offset": (file_of({"a": {**entry(), "data_offsets": [0]}}, b"x"), "data_offsets"),
    "offsets reversed": (file_of({"a": entry(begin=1, end=0)}, b"x"), "data_offsets"),
    "offset negative": (file_of({"a": entry(begin=-1, end=0)}, b"x"), "data_offsets"),
    "offset no number": (file_of({"a": entry(begin="0")}, b"x"), "data_offsets"),
    "offsets true": (file_of({"a": entry(shape=(0,), begin=True, end=1)}, b"x"), "data_offsets"),
    "length not shape": (file_of({"a": entry("F32", (2,), 0, 4)}, bytes(4)), "takes 8 bytes, not 4"),
    "endless shape": (file_of({"a": entry(shape=(0, 2**62, 2**62), end=0)}), "beyond any memory"),
    "length beyond shape": (file_of({"a": entry("F32", (1,), 0, 8)}, bytes(8)), "takes 4 bytes, not 8"),
    "one axis too long": (file_of({"a": entry(shape=(0, 2**63), end=0)}), "beyond any memory"),
    "too many axes": (file_of({"a": entry(shape=(1,) * 65)}, b"x"), "beyond any memory"),
    "a hole before": (file_of({"a": entry(begin=1, end=2)}, b"xy"), "hole after the header"),
    "a hole between": (
        file_of({"a": entry(), "b": entry(begin=2, end=3)}, b"xyz"),
        "hole after those of 'a'",
    ),
    "overlap": (file_of({"a": entry(), "b": entry()}, b"x"), "overlaps"),
    "empty inside": (
        file_of({"a": entry(shape=(2,), end=2), "b": entry(shape=(0,), begin=1)}, b"xy"),
        "overlaps",
    ),
    "bytes left over": (file_of({"a": entry()}, b"xy"), "1 bytes that belong to no tensor"),
}


def compact(content: bytes) -> bytes:
    """The same without blanks in its header, as safetensors itself writes it."""
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b", ", b",").replace(b": ", b":")
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


@pytest.mark.parametrize("blanks", [True, False])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_by_name(tmp_path: Path, case: str, blanks: bool) -> None:
    content, said = HOSTILE[case]
    content = content if blanks else compact(content)

    with pytest.raises(CorruptCheckpointError, match=said) as raised:
        read(tmp_path, content)

    assert not isinstance(raised.value, TruncatedDataError)
    assert raised.value.path.endswith("a.safetensors")
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("content", "needed"),
    [
        (b"", 8),
        (b"\0" * 7, 8),
        (file_of({}, length=3), 11),
        (file_of({"a": entry()}), 8 + len(json.dumps({"a": entry()})) + 1),
        (file_of({}, length=MAX_HEADER_BYTES), 8 + MAX_HEADER_BYTES),
    ],
)
def test_a_file_that_ends_too_early(tmp_path: Path, content: bytes, needed: int) -> None:
    with pytest.raises(TruncatedDataError) as raised:
        read(tmp_path, content)

    assert (raised.value.needed, raised.value.found) == (needed, len(content))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_an_endless_header_is_not_read(tmp_path: Path, length: int) -> None:
    with pytest.raises(CorruptCheckpointError, match="of at most 100000000"):
        read(tmp_path, file_of({}, length=length))


@pytest.mark.parametrize("code", [*sorted(PACKED), "C128", "I4", ""])
def test_types_that_are_not_read_are_named(tmp_path: Path, code: str) -> None:
    with pytest.raises(UnsupportedFormatError, match="'a' is of type") as raised:
        read(tmp_path, file_of({"a": entry(code)}, b"x"))

    assert raised.value.key_path == "['a']"


def test_every_type_has_one_code() -> None:
    assert len(CODES) == len(NAMES)


names = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(
    tensors=st.dictionaries(names, st.tuples(st.sampled_from(["uint8", "int8", "bool"]), shapes), max_size=5),
    metadata=st.dictionaries(names, st.text(max_size=5).filter(str.isprintable), max_size=3),
)
def test_what_is_encoded_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str],
) -> None:
    rows: list[tuple[str, str, tuple[int, ...], int, int]] = []
    end = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = 1
        for size in shape:
            nbytes *= size
        rows.append((name, dtype, shape, end, end + nbytes))
        end += nbytes

    head = encode_header(rows, metadata)
    found = read(tmp_path_factory.mktemp("header"), head + bytes(end))

    assert len(head) % 8 == 0
    assert found.metadata == metadata
    starts = [(t, t.offset - len(head)) for t in found.tensors]
    assert [(t.name, t.dtype, t.shape, start, start + t.nbytes) for t, start in starts] == rows


@given(content=st.binary(max_size=200), cut=st.integers(0, 120), flip=st.integers(0, 119))
def test_any_header_is_decoded_or_an_error_of_penstock(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cut: int, flip: int
) -> None:
    good = bytearray(file_of({"a": entry("F32", (2,), 0, 8), "__metadata__": {"x": "y"}}, bytes(8)))
    good[flip % len(good)] ^= 1 + len(content) % 255
    terse = bytearray(compact(file_of({"__metadata__": {"x": "y"}, "a": entry("F32", (2,), 0, 8)}, bytes(8))))
    terse[flip % len(terse)] ^= 1 + len(content) % 255
    for text in (content, bytes(good[:cut]), bytes(good), file_of(content), bytes(terse)):
        try:
            found = read(tmp_path_factory.mktemp("noise"), text)
        except PenstockError:
            continue

        assert sum(tensor.nbytes for tensor in found.tensors) < len(text)
