"""The reads that fill a region of an array, each with the checksum of what it reads. Pure.

A read that keeps its order in the file and in the region is direct: a range of one to a range of the other.
Any other is scattered by numpy, block by block, so that no read exceeds the size asked for.

`with_checksums` gives reads the checksums that were recorded when the bytes were written. A checksum covers
a piece, as it was written. A read that needs only part of a piece becomes a `CheckedRead` of all of it; where
the checksums of its blocks are known, `narrowed` leaves out those that no one needs. The checksum of several
pieces is computed from theirs (`combined_crc32c`), without their bytes.
"""

from __future__ import annotations

__all__ = (
    "DIRECT_BYTES",
    "NONE",
    "Bounds",
    "StoredChunk",
    "append_zeros_to_each",
    "chunk_reads",
    "chunks_in",
    "combined_crc32c",
    "covers_others",
    "cut_at_pieces",
    "intersect",
    "merge_direct",
    "overlaps",
    "recorded_crc32c",
    "shape_of",
    "with_checksums",
)

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.formats.integrity import Checksum, Checksums
from penstock.kernel.protocols.reads import (
    CheckedRead,
    Destination,
    DirectRead,
    Read,
    RunningChecksums,
    Runs,
    ScatterRead,
)
from penstock.kernel.rectangles import rectangles

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

    def runs(self) -> Runs:
        """Return the ranges that it keeps; see `InRuns`."""
        axis, nbytes = len(self.shape), self.itemsize
        while axis and self.strides[axis - 1] == nbytes:
            axis -= 1
            nbytes *= self.shape[axis]

        alone = replace(self, strides=_strides(self.shape, self.itemsize))
        n_outer = _outer_axes(self.shape, self.shape, shape_of(self.region.bounds))
        into = self._range if math.prod(self.shape[:n_outer]) == 1 else None
        return Runs(self.shape[:axis], self.strides[:axis], nbytes, alone, into)

    def _range(self) -> memoryview:
        """Return the part of the region's memory that the block is, if it is contiguous there."""
        start = _dot(self.corner, _strides(shape_of(self.region.bounds), self.itemsize))
        return self.region.view()[start : start + math.prod(self.shape) * self.itemsize]


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


NONE: Final = Checksums.of(())


def with_checksums(
    reads: Iterable[Read], recorded: Mapping[str, Checksums], piece_bytes: int, directory: str = ""
) -> Iterator[Read]:
    """Give every read of whole pieces its recorded checksum; read pieces whole where a part is needed.

    A direct read needs no memory, so it is cut where pieces begin and end, whatever their size.
    Bytes without a recorded checksum are cut at `piece_bytes`.

    Args:
        reads: Direct ones as long as they are contiguous.
        recorded: Checksums by file, each by ascending offset.
        piece_bytes: Upper bound for a read that cannot be checked.
        directory: What the files in `recorded` are relative to; by default they are absolute, as in reads.

    Yields:
        Reads of whole pieces first, each as soon as it is known. Those of parts come last, since several
        reads may need parts of one piece.
    """
    in_part: dict[tuple[str, int, int], list[CheckedRead]] = {}
    name_at = len(os.path.join(directory, ""))
    for read in reads:
        if isinstance(read, DirectRead):
            found = _cut(read, recorded.get(read.file[name_at:], NONE), piece_bytes)
        elif isinstance(read, ScatterRead) and read.nbytes:
            found = iter([_checked(read, recorded.get(read.file[name_at:], NONE))])
        else:
            found = iter([read])

        for one in found:
            if isinstance(one, CheckedRead):
                in_part.setdefault((one.file, one.offset, one.nbytes), []).append(one)
            else:
                yield one

    for reads_of_one in in_part.values():
        parts = sorted([part for read in reads_of_one for part in read.parts], key=lambda part: part.offset)
        whole = replace(reads_of_one[0], parts=tuple(parts))
        yield whole


def cut_at_pieces(chunk: StoredChunk, bounds: Bounds, recorded: Checksums) -> Iterator[StoredChunk]:
    """Cut a chunk into the rectangles that its pieces are made of, and yield those that overlap `bounds`.

    So no read crosses the edge of a piece. The chunk is yielded as it is if its pieces do not tile it, or
    end within an element.
    """
    nbytes = math.prod(chunk.shape) * chunk.itemsize
    pieces = _tiles(recorded, chunk.offset, nbytes)
    if not pieces or any(piece.nbytes % chunk.itemsize for piece in pieces):
        yield chunk
        return

    for piece in pieces:
        first = (piece.offset - chunk.offset) // chunk.itemsize
        for start, corner, shape in rectangles(chunk.shape, first, first + piece.nbytes // chunk.itemsize):
            place = tuple(map(int.__add__, chunk.start, corner))
            if overlaps(bounds, place, shape):
                yield replace(chunk, offset=chunk.offset + start * chunk.itemsize, start=place, shape=shape)


def covers_others(recorded: Checksums, offset: int, nbytes: int) -> bool:
    """Return whether a piece has bytes of a range and others, too.

    penstock writes no such piece. To compare it, all of it would be read again for each chunk in it.
    """
    first = recorded.from_offset(offset + 1) - 1
    if first >= 0 and recorded[first][:2] == (offset, nbytes):
        return False  # as nearly always

    for at in {first, recorded.from_offset(offset + nbytes) - 1}:
        if at >= 0:
            start, end = recorded[at].offset, recorded[at].offset + recorded[at].nbytes
            if start < offset < end or start < offset + nbytes < end:
                return True

    return False


def recorded_crc32c(recorded: Checksums, offset: int, nbytes: int) -> int | None:
    """Return the crc32c of a range that was written as one piece or several; None if it is not known."""
    tiles = _tiles(recorded, offset, nbytes)
    if len(tiles) == 1:
        return tiles[0].crc32c

    return combined_crc32c([(tile.crc32c, tile.nbytes) for tile in tiles]) if tiles else None


def _tiles(recorded: Checksums, offset: int, nbytes: int) -> list[Checksum]:
    """Return the pieces that together are a range; none if no pieces are."""
    tiles: list[Checksum] = []
    end = offset
    for at in range(recorded.from_offset(offset), len(recorded)):
        piece = recorded[at]
        if end == offset + nbytes or piece.offset != end:
            break

        tiles.append(piece)
        end += piece.nbytes

    return tiles if end == offset + nbytes else []


def _cut(read: DirectRead, recorded: Checksums, piece_bytes: int) -> Iterator[Read]:
    done, end = read.offset, read.offset + read.nbytes
    first = max(recorded.from_offset(read.offset + 1) - 1, 0)  # a piece may begin before the read
    for at in range(first, len(recorded)):
        if done == end:
            return

        piece = recorded[at]
        start, stop = max(piece.offset, done), min(piece.offset + piece.nbytes, end)
        if piece.offset >= end:
            break
        if start >= stop:
            continue

        yield from _plain(read, done, start, piece_bytes)
        if stop - start == piece.nbytes:
            yield _part(read, start, piece.nbytes, piece.crc32c)
        else:
            part = _part(read, start, stop - start, None)
            yield _kept_in_part(piece, recorded.running_of(at), part)

        done = stop

    yield from _plain(read, done, end, piece_bytes)


def _plain(read: DirectRead, start: int, stop: int, piece_bytes: int) -> Iterator[DirectRead]:
    for at in range(start, stop, piece_bytes):
        yield _part(read, at, min(piece_bytes, stop - at), None)


def _part(read: DirectRead, offset: int, nbytes: int, crc32c: int | None) -> DirectRead:
    start = read.start + offset - read.offset
    return DirectRead(read.leaf, read.file, offset, nbytes, read.region, start, crc32c)


def _checked(read: ScatterRead, recorded: Checksums) -> ScatterRead | CheckedRead:
    """Give a scattered read the checksum of its pieces; unchanged if it is not within such."""
    end = read.offset + read.nbytes
    around: list[Checksum] = []
    running: RunningChecksums | None = None
    for at in range(max(recorded.from_offset(read.offset + 1) - 1, 0), len(recorded)):
        piece = recorded[at]
        if piece.offset >= end:
            break
        if piece.offset + piece.nbytes > read.offset:
            running = None if around else recorded.running_of(at)
            around.append(piece)

    if not around or around[0].offset > read.offset:
        return read

    start, nbytes = around[0].offset, sum([piece.nbytes for piece in around])
    crc32c = recorded_crc32c(recorded, start, nbytes)
    if crc32c is None or start + nbytes < end:
        return read
    if (start, nbytes) == (read.offset, read.nbytes):
        return replace(read, crc32c=crc32c)

    return _kept_in_part(Checksum(start, nbytes, crc32c), running, read)


def _kept_in_part(
    whole: Checksum, running: RunningChecksums | None, part: DirectRead | ScatterRead
) -> CheckedRead:
    return CheckedRead(part.leaf, part.file, *whole, (part,), combined_crc32c, running=running)


# As zlib's `crc32_combine` does it: appending zero bytes to a message changes its checksum by a linear map
# over GF(2), and the map for n bytes is a product of maps for powers of two.
_POLYNOMIAL: Final = 0x82F63B78  # of crc32c, its bits reversed

_Map: TypeAlias = tuple[int, ...]
"""A linear map of 32 bits: the image of each bit."""


def combined_crc32c(parts: Iterable[tuple[int, int]]) -> int:
    """Return the crc32c of parts that follow each other.

    Args:
        parts: The crc32c and the number of bytes of each part, in order.
    """
    found = 0
    for crc32c, nbytes in parts:
        found = append_zeros(found, nbytes) ^ crc32c

    return found


def append_zeros(crc32c: int, nbytes: int) -> int:
    """Return the share of a part's checksum in that of the message, if `nbytes` bytes follow."""
    power = 0
    while nbytes and crc32c:
        if nbytes & 1:
            crc32c = _apply(_zeros(power), crc32c)

        nbytes >>= 1
        power += 1

    return crc32c


def append_zeros_to_each(
    crc32cs: npt.NDArray[np.uint32], nbytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Do what `append_zeros` does for many checksums at once, each with its own number of bytes."""
    found, left, power = crc32cs.copy(), nbytes.copy(), 0
    while left.any():
        odd = np.flatnonzero(left & 1)
        if len(odd):
            images, bits = _images(power), found[odd]
            parts = [images[at][bits >> (8 * at) & 0xFF] for at in range(4)]
            found[odd] = parts[0] ^ parts[1] ^ parts[2] ^ parts[3]

        left >>= 1
        power += 1

    return found


@lru_cache(maxsize=64)
def _images(power: int) -> npt.NDArray[np.uint32]:
    """Return the checksum of each value of each byte after 2**power zero bytes, by place and value."""
    map_ = _zeros(power)
    return np.array([[_apply(map_, byte << (8 * at)) for byte in range(256)] for at in range(4)], np.uint32)


@lru_cache(maxsize=64)
def _zeros(power: int) -> _Map:
    """Return the map of 2**power zero bytes."""
    if power:
        return _squared(_zeros(power - 1))

    found: _Map = (_POLYNOMIAL, *[1 << bit for bit in range(31)])  # one zero bit
    for _ in range(3):
        found = _squared(found)

    return found


def _squared(map_: _Map) -> _Map:
    return tuple([_apply(map_, image) for image in map_])


def _apply(map_: _Map, bits: int) -> int:
    found = at = 0
    while bits:
        if bits & 1:
            found ^= map_[at]

        bits >>= 1
        at += 1

    return found
