"""Rectangles in global arrays, and how part of a stored chunk gets into part of a buffer. Pure.

A read that keeps its order in both places is direct: a range of the file to a range of the buffer.
Any other is scattered by numpy, block by block, so that no read exceeds the size asked for.
"""

from __future__ import annotations

__all__ = (
    "DIRECT_BYTES",
    "MOST_BYTES",
    "Bounds",
    "StoredChunk",
    "chunk_reads",
    "chunks_in",
    "intersect",
    "is_beyond_memory",
    "merge_direct",
    "overlaps",
    "rectangles",
    "shape_of",
)

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np

from penstock.kernel.protocols.reads import Destination, DirectRead, Read, ScatterRead

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) along each axis of a global array."""

DIRECT_BYTES: Final = 64 * 1024
"""Shorter contiguous runs are read together and scattered: a read call costs more than the copy."""

# Elements are only moved, so any type of the right size works; numpy copies integers fastest.
_MOVED_AS: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
}

MOST_BYTES: Final = 2**62
"""Of an array or a chunk, so that no size or offset in one needs more than 64 bits."""


@final
@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A whole chunk, raw and in C order, as it is in a file."""

    file: str  #: absolute
    offset: int  #: of its first byte
    start: tuple[int, ...]  #: of its first element, in the global array
    shape: tuple[int, ...]
    itemsize: int


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    """Return the extent along each axis."""
    return tuple([stop - start for start, stop in bounds])


def intersect(first: Bounds, second: Bounds) -> Bounds:
    """Return the part common to both, which must not be empty."""
    return tuple([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True)])


def chunks_in(bounds: Bounds, chunk_shape: Sequence[int]) -> Bounds:
    """Return the ranges of chunk indices that `bounds` touches."""
    return tuple([(a // n, -(-b // n)) for (a, b), n in zip(bounds, chunk_shape, strict=True)])


def chunk_reads(
    leaf: int, chunk: StoredChunk, region: Destination, piece_bytes: int
) -> Iterator[DirectRead | ScatterRead]:
    """Plan the reads that fill the part of `region` that `chunk` overlaps.

    Args:
        leaf: What to put into `Read.leaf`.
        chunk: Overlaps `region`.
        region: Where the bytes go.
        piece_bytes: Upper bound for one scattered read; at least one element. Direct ones are as
            long as they are contiguous, and cut later.
    """
    whole = tuple([(start, start + n) for start, n in zip(chunk.start, chunk.shape, strict=True)])
    part = intersect(whole, region.bounds)
    extent = shape_of(part)
    in_chunk = [lo - start for (lo, _), start in zip(part, chunk.start, strict=True)]
    in_region = [lo - start for (lo, _), (start, _) in zip(part, region.bounds, strict=True)]
    region_shape = shape_of(region.bounds)
    n_outer = _outer_axes(extent, chunk.shape, region_shape)
    run_bytes = math.prod(extent[n_outer:]) * chunk.itemsize
    source = _strides(chunk.shape, chunk.itemsize)
    offset = chunk.offset + _dot(in_chunk, source)
    if run_bytes >= DIRECT_BYTES or math.prod(extent[:n_outer]) == 1:
        destination = _strides(region_shape, chunk.itemsize)
        start = _dot(in_region, destination)
        for index in itertools.product(*map(range, extent[:n_outer])):
            at, to = offset + _dot(index, source), start + _dot(index, destination)
            yield DirectRead(leaf, chunk.file, at, run_bytes, region, to)

        return

    for corner, block in _blocks(extent, source, chunk.itemsize, piece_bytes):
        place = tuple(map(int.__add__, in_region, corner))
        scatter = Scatter(region, place, block, source, chunk.itemsize)
        nbytes = _span(block, source, chunk.itemsize)
        yield ScatterRead(leaf, chunk.file, offset + _dot(corner, source), nbytes, scatter)


def merge_direct(reads: Iterable[Read]) -> Iterator[Read]:
    """Join direct reads of one region that follow each other in the file and in the region alike."""
    last: Read | None = None
    for read in reads:
        if (
            isinstance(last, DirectRead)
            and isinstance(read, DirectRead)
            and last.offset + last.nbytes == read.offset
            and last.start + last.nbytes == read.start
            and last.file == read.file
        ):
            nbytes = last.nbytes + read.nbytes
            last = DirectRead(last.leaf, last.file, last.offset, nbytes, last.region, last.start)
            continue

        if last is not None:
            yield last
        last = read

    if last is not None:
        yield last


def overlaps(bounds: Bounds, start: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a box has elements within `bounds`."""
    boxes = zip(bounds, start, shape, strict=True)
    return all(lo < at + n and at < hi for (lo, hi), at, n in boxes)


def rectangles(
    shape: tuple[int, ...], first: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of elements in C order into rectangles, at most two for each axis.

    Yields:
        The first element, its index along each axis, and the extent of each rectangle, in order.
    """
    while first < stop:
        # The longest rectangle that begins here: rows of the outermost axis that starts afresh.
        axis, inner = len(shape), 1
        while axis and first % (inner * shape[axis - 1]) == 0 and first + inner * shape[axis - 1] <= stop:
            axis -= 1
            inner *= shape[axis]

        start = _unravel(first, shape)
        if not axis:
            yield first, start, shape
            return

        rows = min(shape[axis - 1] - start[axis - 1], (stop - first) // inner)
        extent = (*itertools.repeat(1, axis - 1), rows, *shape[axis:])
        yield first, start, extent
        first += math.prod(extent)


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for n in reversed(shape):
        flat, at = divmod(flat, n)
        index.append(at)

    return tuple(reversed(index))


@final
@dataclass(frozen=True, slots=True)
class Scatter:
    """Copies a block, read with the gaps between its rows, to its place in a region."""

    region: Destination
    corner: tuple[int, ...]  #: of the block, in the region
    shape: tuple[int, ...]  #: of the block
    strides: tuple[int, ...]  #: of the block in the data, bytes
    itemsize: int

    def __call__(self, data: memoryview) -> None:
        dtype = _MOVED_AS.get(self.itemsize) or np.dtype(f"V{self.itemsize}")
        source = np.ndarray(self.shape, dtype, data, strides=self.strides)
        place = np.frombuffer(self.region.view(), dtype).reshape(shape_of(self.region.bounds))
        place[tuple([slice(lo, lo + n) for lo, n in zip(self.corner, self.shape, strict=True)])] = source


def _outer_axes(extent: Sequence[int], chunk: Sequence[int], region: Sequence[int]) -> int:
    """Return how many leading axes must be stepped through: the rest is contiguous in both places."""
    axis = len(extent)
    while axis and extent[axis - 1] == chunk[axis - 1] == region[axis - 1]:
        axis -= 1

    return max(axis - 1, 0)


def _blocks(
    extent: tuple[int, ...], strides: tuple[int, ...], itemsize: int, limit: int, axis: int = 0
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a part of a chunk into blocks whose bytes, gaps included, span at most `limit`.

    Yields:
        The first index and the shape of each block, within the part.
    """
    while axis < len(extent) and extent[axis] == 1:
        axis += 1
    if axis == len(extent) or _span(extent, strides, itemsize) <= limit:
        yield (0,) * len(extent), extent
        return

    row = (*extent[:axis], 1, *extent[axis + 1 :])
    n_rows = max(1, 1 + (limit - _span(row, strides, itemsize)) // strides[axis])
    for first in range(0, extent[axis], n_rows):
        rows = (*extent[:axis], min(n_rows, extent[axis] - first), *extent[axis + 1 :])
        for corner, block in _blocks(rows, strides, itemsize, limit, axis):
            yield (*corner[:axis], corner[axis] + first, *corner[axis + 1 :]), block


def _strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)

    return tuple(strides[::-1]) if shape else ()


def _span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element of a block to the end of its last one."""
    return sum([(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]) + itemsize


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    # The index may be shorter: its missing axes are 0.
    return sum(map(int.__mul__, index, strides))


def is_beyond_memory(shape: Sequence[int], itemsize: int) -> bool:
    """Return whether no array can have this shape, even if an axis of 0 makes it take no bytes."""
    return math.prod([n or 1 for n in shape]) * itemsize > MOST_BYTES
