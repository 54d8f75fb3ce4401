"""The index of a new checkpoint: which chunk lies where, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax.chunk_index import ChunkIndex
from penstock.handlers.formats.orbax.tree_columns import TreeColumns
from penstock.handlers.ocdbt.database_reader import read_index
from penstock.handlers.ocdbt.index import Index
from penstock.handlers.ocdbt.wire_format import Indirect
from penstock.kernel import Leaf, Written, WrittenBatch
from penstock.kernel.protocols import WrittenTable

MANY = 100_000
NODES = "d/nodes"
FLOATS = {"typestr": "jax.Array", "dtype": "float32", "itemsize": 4}


@pytest.fixture
def leaves(make_leaf: Any) -> list[Leaf]:
    """A leaf in one chunk, one in 2 x 3 chunks of 8 bytes, an empty one, and one in 4 chunks."""
    return [
        make_leaf(2, ("a",), **FLOATS, shape=(4,), chunk_shape=(4,)),
        make_leaf(5, ("b",), **FLOATS, shape=(2, 6), chunk_shape=(1, 2)),
        make_leaf(6, ("e",), **FLOATS, shape=(0, 3), chunk_shape=(1, 3)),
        make_leaf(7, ("s",), **FLOATS, shape=(8,), chunk_shape=(2,)),
    ]


def decoded(index: ChunkIndex, batches: Sequence[WrittenBatch], folder: Path) -> Index:
    """Encode it, and read it as a restore would."""
    encoded = index.encode(batches, node_file=NODES, uuid=bytes(16), commit_time_ns=1)
    (folder / "d").mkdir()
    (folder / NODES).write_bytes(encoded.nodes)
    (folder / "manifest.ocdbt").write_bytes(encoded.manifest)
    return read_index(LocalStore(), str(folder))


def table(leaves: Sequence[Leaf], parts: Iterable[Written]) -> WrittenBatch:
    return WrittenBatch((), WrittenTable.of(parts, {leaf.index: leaf.spec for leaf in leaves}))


def part(leaf: int, chunk: tuple[int, ...], offset: int, nbytes: int, start: int = 0) -> Written:
    return Written(leaf, chunk, start, "d/data", offset, nbytes, 0)


def all_parts() -> list[Written]:
    """Every chunk of `leaves`, in one order or another."""
    grid = list(itertools.product(range(2), range(3)))
    return [
        *[part(7, (at,), 1000 + 8 * at, 8) for at in reversed(range(4))],
        *[part(5, chunk, 100 + 8 * at, 8) for at, chunk in enumerate(grid)],
        part(2, (0,), 4, 12, start=4),
        part(2, (0,), 0, 4),
    ]


def test_every_chunk_is_found_where_it_was_written(leaves: list[Leaf], tmp_path: Path) -> None:
    found = decoded(ChunkIndex(TreeColumns.of(leaves)), [table(leaves, all_parts())], tmp_path)

    chunks = {key: value for key, value in found.items() if not key.endswith(b".zarray")}
    assert chunks == {
        b"a/0": Indirect("d/data", 0, 16),
        **{
            f"b/{i}.{j}".encode(): Indirect("d/data", 100 + 24 * i + 8 * j, 8)
            for i in (0, 1)
            for j in (0, 1, 2)
        },
        **{f"s/{at}".encode(): Indirect("d/data", 1000 + 8 * at, 8) for at in range(4)},
    }
    assert [key for key in found if key.endswith(b".zarray")] == [
        b"a/.zarray",
        b"b/.zarray",
        b"e/.zarray",
        b"s/.zarray",
    ]


def test_the_chunks_of_a_packed_leaf_follow_each_other(leaves: list[Leaf], tmp_path: Path) -> None:
    single, grid, _, line = leaves
    parts = [(leaf, chunk) for leaf in (line, single, grid) for chunk in leaf.spec.chunk_indices()]
    sizes = [leaf.spec.chunk_nbytes for leaf, _ in parts]
    ends = itertools.accumulate(sizes, initial=64)
    rows = [
        Written(leaf.index, chunk, 0, "d/pack", at, size, 0)
        for (leaf, chunk), at, size in zip(parts, ends, sizes, strict=False)
    ]
    found = decoded(ChunkIndex(TreeColumns.of(leaves)), [table(leaves, rows)], tmp_path)

    assert [found[f"s/{at}".encode()] for at in range(4)] == [
        Indirect("d/pack", 64 + 8 * at, 8) for at in range(4)
    ]
    assert found[b"a/0"] == Indirect("d/pack", 96, 16)
    assert found[b"b/0.0"] == Indirect("d/pack", 112, 8)
    assert found[b"b/1.2"] == Indirect("d/pack", 152, 8)


@pytest.mark.parametrize("chunk", [(2, 0), (0, 3), (-1, 0), (0,), (0, 0, 0)])
def test_a_chunk_outside_of_the_grid_is_refused(leaves: list[Leaf], chunk: tuple[int, ...]) -> None:
    with pytest.raises(PenstockError, match="of leaf 5 was written, but no leaf of the tree has it"):
        ChunkIndex(TreeColumns.of(leaves)).encode(
            [table(leaves, [*all_parts(), part(5, chunk, 0, 8)])],
            node_file=NODES,
            uuid=bytes(16),
            commit_time_ns=1,
        )


def test_what_was_written_of_a_leaf_that_the_tree_has_not_is_refused(leaves: list[Leaf]) -> None:
    written = table(leaves, [*all_parts(), part(2, (0,), 0, 16)])
    with pytest.raises(PenstockError, match="of leaf 2 was written, but no leaf of the tree has it"):
        ChunkIndex(TreeColumns.of(leaves[1:])).encode(
            [written], node_file=NODES, uuid=bytes(16), commit_time_ns=1
        )


@pytest.mark.parametrize(("absent", "named"), [((5, (1, 2)), r"'b'.*\(1, 2\)"), ((7, (0,)), r"'s'.*\(0,\)")])
def test_a_missing_chunk_is_named(
    leaves: list[Leaf], absent: tuple[int, tuple[int, ...]], named: str
) -> None:
    parts = tuple(each for each in all_parts() if (each.leaf, each.chunk) != absent)
    with pytest.raises(PenstockError, match=f"{named}.*0 of 8 bytes were written"):
        ChunkIndex(TreeColumns.of(leaves)).encode(
            [table(leaves, parts)], node_file=NODES, uuid=bytes(16), commit_time_ns=1
        )


def test_the_time_for_many_chunks_grows_with_their_number_alone(make_leaf: Any, tmp_path: Path) -> None:
    # A search for each chunk among all of them would run into the time limit of a test.
    leaf = make_leaf(0, ("w",), **FLOATS, shape=(MANY,), chunk_shape=(1,))
    parts = tuple([part(0, (at,), 4 * at, 4) for at in range(MANY)])
    found = decoded(ChunkIndex(TreeColumns.of([leaf])), [table([leaf], parts)], tmp_path)

    assert len(found) == MANY + 1
    assert found[f"w/{MANY - 1}".encode()] == Indirect("d/data", 4 * (MANY - 1), 4)
