"""Leaves whose chunks follow each other are found all at once, with one checksum each; others are not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from penstock.handlers.formats.common.chunk_keys import GridKeys
from penstock.handlers.formats.common.integrity import Checksums
from penstock.handlers.formats.common.leaf_table import LeafTable, StoredLeaves
from penstock.handlers.formats.common.zarr_metadata import decode, encode_v2
from penstock.handlers.formats.orbax.reading.whole_chunks import whole_chunks
from penstock.handlers.ocdbt.index_entries import Index
from penstock.handlers.ocdbt.value_refs import Indirect, Inline, Value
from penstock.kernel.protocols.leaf import KeyKind, LeafSpec
from penstock.kernel.protocols.reads import WholeChunks

SHAPE, CHUNK = (4, 6), (2, 3)  # four chunks of 24 bytes
KEYS = [b"w/0.0", b"w/0.1", b"w/1.0", b"w/1.1"]
IN_ORDER = {key: Indirect("d/x", 100 + 24 * at, 24) for at, key in enumerate(KEYS)}
SINGLE = {b"s/0.0": Indirect("d/x", 0, 96)}
DATA = bytes(range(196))


def look_up(
    values: Mapping[bytes, Value],
    *,
    recorded: Sequence[tuple[int, int]] | None = None,
    arrays: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
) -> WholeChunks:
    """Where the leaves `s`, of one chunk, and `w` lie, if the pieces in `recorded` have checksums."""
    arrays = {"s": (SHAPE, SHAPE), "w": (SHAPE, CHUNK)} if arrays is None else arrays
    index = Index.of(values)
    forms = [decode("x", encode_v2(shape, "float32", chunk)) for shape, chunk in arrays.values()]
    specs = [LeafSpec("jax.Array", shape, "float32", 4, chunk) for shape, chunk in arrays.values()]
    kinds = [(KeyKind.MAPPING,)] * len(arrays)
    table = LeafTable([(name,) for name in arrays], kinds, specs, forms, index.rows)
    sums = {}
    if recorded is not None:
        sums = {"/c/d/x": Checksums.of([(at, n, crc32c(DATA[at : at + n])) for at, n in recorded])}

    return whole_chunks(StoredLeaves("/c", table), index, sums, "/c", range(len(arrays)))


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


def test_nothing_is_found_of_nothing(tmp_path: Path) -> None:
    assert look_up({}).ids == [-1, -1]
    assert look_up({}, arrays={}).ids == []
