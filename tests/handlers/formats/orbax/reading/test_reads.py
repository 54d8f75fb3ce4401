"""Any part of any plainly stored array, against numpy slicing."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptCheckpointError
from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.orbax.tree_metadata import encode_tree_metadata as encode_metadata
from penstock.handlers.formats.region_reads import DIRECT_BYTES, merge_direct
from penstock.handlers.formats.zarr import encode_v2
from penstock.handlers.ocdbt.database_writer import encode_index
from penstock.handlers.ocdbt.index import Index
from penstock.handlers.ocdbt.wire_format import Inline
from penstock.kernel import CheckedRead, DirectRead, DriverRead, ScatterRead

pytestmark = pytest.mark.anyio


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    counts = draw(st.lists(st.integers(1, 4), max_size=4))
    chunk_shape = tuple(draw(st.integers(1, 5)) for _ in counts)
    shape = tuple(n * chunk for n, chunk in zip(counts, chunk_shape, strict=True))
    some = tuple(tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    one_chunk = tuple((n - chunk, n) for n, chunk in zip(shape, chunk_shape, strict=True))
    bounds = draw(st.sampled_from([some, some, one_chunk, tuple((0, n) for n in shape)]))
    return {
        "shape": shape,
        "chunk_shape": chunk_shape,
        "bounds": bounds,
        "dtype": draw(st.sampled_from(["int8", "bfloat16", "float32", "int64", "complex128"])),
        "piece_bytes": draw(st.sampled_from([16, 40, 200, 1 << 20])),
        "written_in": draw(st.sampled_from([16, 48, 1 << 20])),
    }


@pytest.mark.many_cases
@given(case=cases())
def test_any_part_of_any_chunking_is_what_numpy_slices(
    case: dict[str, Any], make_leaf: Any, write_flat: Any, read_part: Any
) -> None:
    array = np.random.default_rng(0).bytes(int(np.prod(case["shape"])) * numpy_dtype(case["dtype"]).itemsize)
    values = np.frombuffer(array, numpy_dtype(case["dtype"])).reshape(case["shape"])
    leaf = make_leaf(0, ("a",), like=values, chunk_shape=case["chunk_shape"])
    directory = Path(tempfile.mkdtemp())
    try:
        write_flat(directory, [leaf], {0: values}, piece_bytes=case["written_in"])
        checkpoint = OrbaxLayout().open(LocalStore(), str(directory))
        (stored,) = checkpoint.leaves

        found = anyio.run(read_part, checkpoint, stored, case["bounds"], case["piece_bytes"])
    finally:
        shutil.rmtree(directory)

    assert found.tobytes() == values[tuple(slice(*bound) for bound in case["bounds"])].tobytes()


class Nowhere:
    """A destination that must not be touched."""

    def __init__(self, bounds: tuple[tuple[int, int], ...], itemsize: int) -> None:
        self.bounds = bounds
        self.nbytes = int(np.prod([stop - start for start, stop in bounds])) * itemsize

    def fresh(self) -> Nowhere:
        raise NotImplementedError

    def view(self) -> memoryview:
        raise AssertionError("planning must not allocate")


def planned(path: Path, bounds: tuple[tuple[int, int], ...], piece_bytes: int) -> list[Any]:
    checkpoint = OrbaxLayout().open(LocalStore(), str(path))
    (stored,) = checkpoint.leaves
    return list(checkpoint.reads(0, stored, Nowhere(bounds, stored.spec.itemsize), piece_bytes))


def test_a_whole_chunk_is_one_direct_read(make_leaf: Any, write_flat: Any, tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    write_flat(tmp_path, [make_leaf(0, ("a",), like=values)], {0: values})

    (read,) = planned(tmp_path, ((0, 8), (0, 8)), 1 << 20)

    assert isinstance(read, DirectRead)
    assert (read.offset, read.start, read.nbytes) == (0, 0, 256)
    assert Path(read.file).is_absolute()


def test_direct_reads_are_cut_at_the_piece_size(make_leaf: Any, write_flat: Any, tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    write_flat(tmp_path, [make_leaf(0, ("a",), like=values)], {0: values})
    (tmp_path / "_PENSTOCK_INTEGRITY").unlink()

    reads = planned(tmp_path, ((1, 8), (0, 8)), 100)

    assert [(read.offset, read.start, read.nbytes) for read in reads] == [
        (32, 0, 100),
        (132, 100, 100),
        (232, 200, 24),
    ]


def test_chunks_that_follow_each_other_are_read_together(
    make_leaf: Any, write_flat: Any, tmp_path: Path
) -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    write_flat(tmp_path, [make_leaf(0, ("a",), like=values, chunk_shape=(2, 8))], {0: values})
    (tmp_path / "_PENSTOCK_INTEGRITY").unlink()

    reads = planned(tmp_path, ((0, 8), (0, 8)), 128)

    assert [(read.offset, read.start, read.nbytes) for read in reads] == [(0, 0, 128), (128, 128, 128)]


def test_long_rows_are_read_directly_and_short_rows_are_scattered(
    make_leaf: Any, write_flat: Any, tmp_path: Path
) -> None:
    row = DIRECT_BYTES // 4
    values = np.zeros((3, 2 * row), np.float32)
    write_flat(tmp_path, [make_leaf(0, ("a",), like=values)], {0: values}, piece_bytes=1 << 30)
    (tmp_path / "_PENSTOCK_INTEGRITY").unlink()

    long = planned(tmp_path, ((0, 3), (0, row)), 1 << 20)
    short = planned(tmp_path, ((0, 3), (0, row - 1)), 1 << 30)

    assert [type(read) for read in long] == [DirectRead] * 3
    assert [type(read) for read in short] == [ScatterRead]


async def test_a_region_as_large_as_a_chunk_may_lie_across_two(
    make_leaf: Any, write_flat: Any, read_part: Any, tmp_path: Path
) -> None:
    values = np.arange(8, dtype=np.int32)
    write_flat(tmp_path, [make_leaf(0, ("a",), like=values, chunk_shape=(4,))], {0: values})
    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path))

    np.testing.assert_array_equal(await read_part(checkpoint, checkpoint.leaves[0], ((2, 6),)), [2, 3, 4, 5])


async def test_long_rows_of_several_chunks_are_not_joined_across_a_gap(
    make_leaf: Any, write_flat: Any, read_part: Any, tmp_path: Path
) -> None:
    row = DIRECT_BYTES // 8
    values = np.arange(4 * row, dtype=np.int64).reshape(2, 2 * row)
    write_flat(
        tmp_path, [make_leaf(0, ("a",), like=values, chunk_shape=(2, row))], {0: values}, piece_bytes=1 << 30
    )
    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path))

    np.testing.assert_array_equal(await read_part(checkpoint, checkpoint.leaves[0], None, 1 << 30), values)


def test_reads_of_different_files_are_not_joined() -> None:
    region = Nowhere(((0, 8),), 1)
    reads = [DirectRead(0, "first", 0, 4, region, 0), DirectRead(0, "second", 4, 4, region, 4)]

    assert list(merge_direct(reads)) == reads


async def test_values_that_lie_in_the_index_are_read_without_a_data_file(
    make_leaf: Any, read_part: Any, tmp_path: Path
) -> None:
    values = np.arange(12, dtype=np.int16).reshape(3, 4)
    leaf = make_leaf(0, ("a",), like=values)
    index = encode_index(
        [
            (b"a/.zarray", Inline(encode_v2((3, 4), "int16", (3, 4)))),
            (b"a/0.0", Inline(values.tobytes())),
        ],
        node_file="d/nodes",
        node_offset=0,
        uuid=bytes(16),
        commit_time_ns=1,
    )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "nodes").write_bytes(index.nodes)
    (tmp_path / "manifest.ocdbt").write_bytes(index.manifest)
    (tmp_path / "_METADATA").write_bytes(b"".join(encode_metadata([leaf.info], [leaf.spec])))
    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path))
    (stored,) = checkpoint.leaves

    for bounds in (((0, 3), (0, 4)), ((1, 3), (2, 4)), ((2, 3), (1, 2))):
        found = await read_part(checkpoint, stored, bounds)
        np.testing.assert_array_equal(found, values[tuple(slice(*bound) for bound in bounds)])


def without_a_chunk(path: Path, make_leaf: Any, write_flat: Any, all_written: bool) -> Any:
    """Write two chunks, forget one, and say whether that is an error."""
    values = np.arange(8, dtype=np.int32)
    leaf = make_leaf(0, ("a",), like=values, chunk_shape=(4,))
    write_flat(path, [leaf], {0: values})
    checkpoint = OrbaxLayout().open(LocalStore(), str(path))
    index = encode_index(
        [(key, value) for key, value in checkpoint.index.items() if key != b"a/1"],
        node_file="d/fewer",
        node_offset=0,
        uuid=bytes(16),
        commit_time_ns=1,
    )
    (path / "d" / "fewer").write_bytes(index.nodes)
    (path / "manifest.ocdbt").write_bytes(index.manifest)
    flag = b'"store_array_data_equal_to_fill_value": '
    document = (path / "_METADATA").read_bytes()
    (path / "_METADATA").write_bytes(
        document.replace(flag + b"true", flag + str(all_written).lower().encode())
    )
    return OrbaxLayout().open(LocalStore(), str(path))


async def test_a_chunk_that_was_never_written_reads_as_zeros(
    make_leaf: Any, write_flat: Any, read_part: Any, tmp_path: Path
) -> None:
    checkpoint = without_a_chunk(tmp_path, make_leaf, write_flat, all_written=False)
    (stored,) = checkpoint.leaves

    np.testing.assert_array_equal(await read_part(checkpoint, stored, ((2, 7),)), [2, 3, 0, 0, 0])
    kinds = [type(read) for read in checkpoint.reads(0, stored, Nowhere(((2, 7),), 4), 1 << 20)]
    assert kinds == [DriverRead, CheckedRead]  # half of a piece is compared as a whole


def test_a_chunk_that_was_written_and_is_missing_names_its_leaf(
    make_leaf: Any, write_flat: Any, tmp_path: Path
) -> None:
    checkpoint = without_a_chunk(tmp_path, make_leaf, write_flat, all_written=True)
    (stored,) = checkpoint.leaves

    with pytest.raises(CorruptCheckpointError, match=r"chunk 'a/1' is missing \(leaf \['a'\]\)"):
        list(checkpoint.reads(0, stored, Nowhere(((2, 7),), 4), 1 << 20))
    assert list(checkpoint.reads(0, stored, Nowhere(((0, 4),), 4), 1 << 20))


def test_a_chunk_of_the_wrong_length_names_its_leaf(make_leaf: Any, write_flat: Any, tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.int32)
    write_flat(tmp_path, [make_leaf(0, ("a",), like=values)], {0: values})
    opened = OrbaxLayout().open(LocalStore(), str(tmp_path))
    checkpoint = replace(opened, index=Index.of({**opened.index, b"a/0": Inline(b"1234")}))
    (stored,) = checkpoint.leaves

    with pytest.raises(CorruptCheckpointError, match=r"chunk 'a/0' has 4 bytes, not 32 \(leaf \['a'\]\)"):
        list(checkpoint.reads(0, stored, Nowhere(((0, 8),), 4), 1 << 20))


def test_every_read_is_of_whole_pieces_with_their_checksums(
    make_leaf: Any, write_flat: Any, tmp_path: Path
) -> None:
    values = np.arange(64, dtype=np.uint8)
    write_flat(tmp_path, [make_leaf(0, ("a",), like=values)], {0: values}, piece_bytes=16)
    raw = values.tobytes()

    reads = sorted(planned(tmp_path, ((8, 60),), 1 << 20), key=lambda read: read.offset)

    assert [(read.offset, read.nbytes) for read in reads] == [(0, 16), (16, 16), (32, 16), (48, 16)]
    assert [read.crc32c for read in reads] == [crc32c(raw[at : at + 16]) for at in range(0, 64, 16)]


async def test_a_long_piece_is_read_whole_and_kept_in_part(
    make_leaf: Any, write_flat: Any, read_part: Any, tmp_path: Path
) -> None:
    values = np.arange(DIRECT_BYTES, dtype=np.int64).reshape(8, -1)
    write_flat(tmp_path, [make_leaf(0, ("a",), like=values)], {0: values}, piece_bytes=1 << 30)
    checkpoint = OrbaxLayout().open(LocalStore(), str(tmp_path))
    bounds = ((1, 3), (5, 900))

    (read,) = planned(tmp_path, bounds, 1 << 20)

    assert isinstance(read, CheckedRead)
    assert (read.offset, read.nbytes) == (0, values.nbytes)
    assert read.scratch_nbytes < values.nbytes // 2
    found = await read_part(checkpoint, checkpoint.leaves[0], bounds)
    np.testing.assert_array_equal(found, values[1:3, 5:900])
