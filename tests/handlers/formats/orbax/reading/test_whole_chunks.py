"""Leaves whose chunks were written in one piece each are found all at once; others are not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from penstock.handlers import LocalStore
from penstock.handlers.formats.integrity import Checksums
from penstock.handlers.formats.leaf_table import LeafTable, StoredLeaves
from penstock.handlers.formats.orbax.stored_checkpoint import OrbaxCheckpoint, whole_parts
from penstock.handlers.formats.zarr import GridKeys, decode, encode_v2
from penstock.handlers.ocdbt.index import Index
from penstock.handlers.ocdbt.wire_format import Indirect, Inline, Value
from penstock.kernel import KeyKind, LeafSpec, WholeChunks, Written

SHAPE, CHUNK = (4, 6), (2, 3)  # four chunks of 24 bytes
KEYS = [b"w/0.0", b"w/0.1", b"w/1.0", b"w/1.1"]
IN_ORDER = {key: Indirect("d/x", 100 + 24 * at, 24) for at, key in enumerate(KEYS)}
SINGLE = {b"s/0.0": Indirect("d/x", 0, 96)}
DATA = bytes(range(196))


Arrays = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
BOTH: Arrays = {"s": (SHAPE, SHAPE), "w": (SHAPE, CHUNK)}
PIECES = [(0, 96), *[(100 + 24 * at, 24) for at in range(4)]]


def stored(values: Mapping[bytes, Value], arrays: Arrays) -> tuple[StoredLeaves, Index]:
    index = Index.of(values)
    forms = [decode("x", encode_v2(shape, "float32", chunk)) for shape, chunk in arrays.values()]
    specs = [LeafSpec("jax.Array", shape, "float32", 4, chunk) for shape, chunk in arrays.values()]
    kinds = [(KeyKind.MAPPING,)] * len(arrays)
    table = LeafTable([(name,) for name in arrays], kinds, specs, forms, index.table)
    return StoredLeaves("/c", table), index


def sums_of(pieces: Sequence[tuple[int, int]]) -> Checksums:
    return Checksums.of([(at, n, crc32c(DATA[at : at + n])) for at, n in pieces])


def look_up(
    values: Mapping[bytes, Value],
    *,
    recorded: Sequence[tuple[int, int]] | None = None,
    arrays: Arrays = BOTH,
) -> WholeChunks:
    """Where the leaves `s`, of one chunk, and `w` lie, if the pieces in `recorded` have checksums."""
    leaves, index = stored(values, arrays)
    sums = {} if recorded is None else {"d/x": sums_of(recorded)}
    checkpoint = OrbaxCheckpoint(
        store=LocalStore(),
        path="/c",
        directory="/c",
        leaves=leaves,
        custom_metadata=None,
        committed_at_ns=None,
        uses_ocdbt=True,
        all_chunks_written=True,
        checksums=sums,
        index=index,
    )
    return checkpoint.whole_chunks(range(len(arrays)))


def parts(
    values: Mapping[bytes, Value], recorded: Sequence[tuple[int, int]] = PIECES, arrays: Arrays = BOTH
) -> list[tuple[Written, ...] | None]:
    """The parts of the leaves `w` and `s`, as those of the leaves 7 and 5 of another tree."""
    leaves, index = stored(values, arrays)
    return whole_parts(leaves, index, {"d/x": sums_of(recorded)}, [1, 0], [7, 5])


def part(leaf: int, chunk: tuple[int, int], offset: int, nbytes: int) -> Written:
    return Written(leaf, chunk, 0, "d/x", offset, nbytes, crc32c(DATA[offset : offset + nbytes]))


def test_chunks_are_the_parts_that_they_were_written_in_wherever_they_lie() -> None:
    chunks = [(0, 0), (0, 1), (1, 0), (1, 1)]
    in_order = tuple(part(7, chunk, 100 + 24 * at, 24) for at, chunk in enumerate(chunks))
    single = (part(5, (0, 0), 0, 96),)
    backwards = {key: Indirect("d/x", 172 - 24 * at, 24) for at, key in enumerate(KEYS)}

    assert parts(SINGLE | IN_ORDER) == [in_order, single]
    assert parts(SINGLE | backwards) == [
        tuple(part(7, chunk, 172 - 24 * at, 24) for at, chunk in enumerate(chunks)),
        single,
    ]


@pytest.mark.parametrize(
    "change",
    [
        {KEYS[1]: Indirect("d/y", 124, 24)},
        {KEYS[1]: Indirect("d/x", 124, 23)},
        {KEYS[1]: Indirect("d/x", 125, 24)},
        {KEYS[3]: Inline(bytes(24))},
        {KEYS[2]: None},
    ],
    ids=["a file without checksums", "another length", "another place", "inline", "missing"],
)
def test_a_leaf_with_a_chunk_that_is_no_recorded_piece_has_no_parts_here(change: dict[bytes, Any]) -> None:
    values = {key: value for key, value in (SINGLE | IN_ORDER | change).items() if value is not None}

    assert parts(values) == [None, (part(5, (0, 0), 0, 96),)]


def test_a_chunk_in_two_pieces_or_that_juts_out_is_no_part_here() -> None:
    pieces = [(0, 96), (100, 12), (112, 12), *[(100 + 24 * at, 24) for at in (1, 2, 3)]]

    assert parts(SINGLE | IN_ORDER, pieces) == [None, (part(5, (0, 0), 0, 96),)]
    assert parts(SINGLE | IN_ORDER, arrays={"s": (SHAPE, SHAPE), "w": ((4, 5), CHUNK)})[0] is None
    assert parts({}) == [None, None]


def test_chunks_that_follow_each_other_are_one_range() -> None:
    found = look_up(SINGLE | IN_ORDER)

    assert (found.files, found.ids, found.offsets) == (["/c/d/x"], [0, 0], [0, 100])
    assert found.crc32cs == [-1, -1]


def test_the_checksum_of_a_leaf_is_made_of_those_of_its_chunks() -> None:
    pieces = [(0, 96), *[(100 + 24 * at, 24) for at in range(4)]]
    found = look_up(SINGLE | IN_ORDER, recorded=pieces)

    assert found.crc32cs == [crc32c(DATA[:96]), crc32c(DATA[100:196])]
    assert found.ids == [0, 0]


@pytest.mark.parametrize(
    "pieces",
    [[(100, 24), (124, 24), (172, 24)], [(100, 12), (112, 12), *[(100 + 24 * at, 24) for at in (1, 2, 3)]]],
)
def test_a_leaf_with_a_chunk_in_pieces_or_without_a_checksum_is_left_out(
    pieces: list[tuple[int, int]],
) -> None:
    found = look_up(SINGLE | IN_ORDER, recorded=[(0, 96), *pieces])

    assert found.ids == [0, -1]


@pytest.mark.parametrize(
    "change",
    [
        {KEYS[1]: Indirect("d/x", 125, 24)},
        {KEYS[1]: Indirect("d/y", 124, 24)},
        {KEYS[1]: Indirect("d/x", 124, 23)},
        {KEYS[0]: Indirect("d/x", 124, 24), KEYS[1]: Indirect("d/x", 100, 24)},
        {KEYS[3]: Inline(bytes(24))},
        dict.fromkeys(KEYS, Inline(bytes(24))),
        {KEYS[2]: None},
    ],
    ids=["gap", "another file", "another length", "another order", "inline", "all inline", "missing"],
)
def test_chunks_that_lie_in_another_way_are_left_out(change: dict[bytes, Any]) -> None:
    values = {key: value for key, value in (SINGLE | IN_ORDER | change).items() if value is not None}

    assert look_up(values).ids == [0, -1]


def test_chunks_that_jut_out_are_left_out() -> None:
    arrays = {"s": (SHAPE, SHAPE), "w": ((4, 5), CHUNK)}

    assert look_up(SINGLE | IN_ORDER, arrays=arrays).ids == [0, -1]


def test_a_grid_that_is_only_claimed_costs_as_much_as_what_is_stored_of_it() -> None:
    asked: list[tuple[int, ...]] = []

    def key(index: tuple[int, ...]) -> str:
        asked.append(index)
        return str(index[0])

    keys = GridKeys((2**40,), key)
    for stored in (2, 1, 3, 0):
        wanted = [b"%d" % at for at in range(stored)]
        assert list(itertools.takewhile(wanted.__contains__, keys)) == wanted

    assert asked == [(0,), (1,), (2,), (3,)]


def test_an_index_without_arrays_has_no_chunks(tmp_path: Path) -> None:
    assert look_up({}).ids == [-1, -1]
    assert look_up({}, arrays={}).ids == []
