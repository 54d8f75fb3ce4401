"""Which chunks of an array's grid are stored, and which are not. Pure.

A document may claim a grid of any size. What is done for it grows with the chunks that are stored, and never
with those that are not.
"""

from __future__ import annotations

__all__ = ("Found", "first_missing", "found_chunks", "stored_rows")

import math
from collections.abc import Iterator
from typing import NamedTuple, final

from penstock.handlers.formats.common.chunk_keys import grid_indices
from penstock.handlers.formats.common.chunk_regions import Bounds, rectangles, shape_of
from penstock.handlers.formats.common.leaf_table import StoredArray
from penstock.handlers.ocdbt.index_entries import Index
from penstock.handlers.ocdbt.value_refs import Value


@final
class Found(NamedTuple):
    """A stored chunk, or a box of chunks of which none is stored."""

    start: tuple[int, ...]  #: index of the chunk, or of the first one in the box
    shape: tuple[int, ...]  #: of the box, in chunks; all 1 for a stored chunk
    value: Value | None  #: where the chunk lies; None for the box

    @property
    def chunks(self) -> Bounds:
        """The box as ranges of chunk indices."""
        return tuple([(at, at + n) for at, n in zip(self.start, self.shape, strict=True)])


def found_chunks(index: Index, array: StoredArray, grid: Bounds) -> Iterator[Found]:
    """Yield what is stored of a part of an array's grid, and boxes of what is not; together they tile it.

    Args:
        index: Where all chunks lie.
        array: Whose keys to look up.
        grid: Ranges of chunk indices, none of them empty.
    """
    extent, lows = shape_of(grid), [low for low, _ in grid]
    ones = (1,) * len(grid)
    if extent == ones:  # as of nearly every leaf: there is nothing to tile
        row = index.rows.get((array.prefix + array.format.chunk_key(lows)).encode())
        yield Found(tuple(lows), ones, None if row is None else index.value(row))
        return

    done = 0  # chunks passed so far, in C order
    for at, row in stored_rows(index, array, grid):
        flat = 0
        for i, low, n in zip(at, lows, extent, strict=True):
            flat = flat * n + i - low

        yield from _boxes(extent, lows, done, flat)
        yield Found(at, ones, index.value(row))
        done = flat + 1

    yield from _boxes(extent, lows, done, math.prod(extent))


def first_missing(index: Index, array: StoredArray, grid: Bounds) -> tuple[int, ...] | None:
    """Return the index of the first chunk that is not stored; None if all are."""
    return next((found.start for found in found_chunks(index, array, grid) if found.value is None), None)


def _boxes(extent: tuple[int, ...], lows: list[int], first: int, stop: int) -> Iterator[Found]:
    for _, start, shape in rectangles(extent, first, stop):
        yield Found(tuple(map(int.__add__, start, lows)), shape, None)


def stored_rows(index: Index, array: StoredArray, grid: Bounds) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield index and row of every chunk that is stored, in C order."""
    rows = index.rows_below(array.prefix.encode())
    if math.prod(shape_of(grid)) <= 2 * len(rows):
        get = index.rows.get
        for at in grid_indices(grid):
            row = get((array.prefix + array.format.chunk_key(at)).encode())
            if row is not None:
                yield at, row

        return

    keys = index.keys_in_order
    there: list[tuple[tuple[int, ...], int]] = []
    for row in rows:
        found = array.format.chunk_index(keys[row][len(array.prefix.encode()) :])
        if found is not None and all(lo <= i < hi for i, (lo, hi) in zip(found, grid, strict=True)):
            there.append((found, row))

    yield from sorted(there)
