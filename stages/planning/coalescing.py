"""Joins reads of one leaf that overlap in the file, so that bytes for several devices are read once. Pure."""

from __future__ import annotations

__all__ = ("join_reads",)

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeGuard

from penstock.kernel.protocols.reads import CheckedRead, DirectRead, Read, ScatterRead


def join_reads(reads: Sequence[Read], piece_bytes: int) -> tuple[Read, ...]:
    """Join scattered reads whose byte ranges overlap, as they do when columns go to several devices.

    Args:
        reads: The reads of one leaf.
        piece_bytes: Upper bound for a joined read. A read with a checksum is never made longer.

    Returns:
        Reads that bring the same bytes to the same places. A byte is read twice only if a single read
        would be too long.
    """
    checked = [read for read in reads if isinstance(read, CheckedRead)]
    scattered = [read for read in reads if _is_joined(read)]
    if len(scattered) < 2 and len(checked) < 2:
        return tuple(reads)

    others = [read for read in reads if not isinstance(read, CheckedRead) and not _is_joined(read)]
    return (*others, *_join_scattered(scattered, piece_bytes), *_join_checked(checked, piece_bytes))


def _join_scattered(reads: Sequence[ScatterRead], most: int) -> list[ScatterRead]:
    if len(reads) < 2:
        return list(reads)

    ordered = sorted(reads, key=lambda read: (read.file, read.offset, -read.nbytes))
    return list(map(_joined, _overlapping(ordered, most)))


def _join_checked(reads: Sequence[CheckedRead], most: int) -> Iterator[CheckedRead]:
    """Read a range once of which several regions need parts."""
    by_range: dict[tuple[str, int, int], list[CheckedRead]] = {}
    for read in reads:
        by_range.setdefault((read.file, read.offset, read.nbytes), []).append(read)

    for same in by_range.values():
        if len(same) == 1:
            yield same[0]
            continue

        parts = [part for read in same for part in read.parts]
        kept: list[DirectRead | ScatterRead] = [part for part in parts if isinstance(part, DirectRead)]
        kept += _join_scattered([part for part in parts if isinstance(part, ScatterRead)], most)
        yield replace(same[0], parts=tuple(sorted(kept, key=lambda part: part.offset)))


def _overlapping(reads: Sequence[ScatterRead], most: int) -> Iterator[list[ScatterRead]]:
    group = [reads[0]]
    start, stop = reads[0].offset, reads[0].offset + reads[0].nbytes
    for read in reads[1:]:
        end = max(stop, read.offset + read.nbytes)
        fits = end == stop or (end - start <= most and all(each.crc32c is None for each in group))
        alike = read.crc32c is None or (read.offset, read.nbytes) == (start, stop - start)
        if read.file == group[0].file and read.offset < stop and fits and alike:
            group.append(read)
            stop = end
        else:
            yield group
            group, start, stop = [read], read.offset, read.offset + read.nbytes

    yield group


def _joined(group: Sequence[ScatterRead]) -> ScatterRead:
    if len(group) == 1:
        return group[0]

    first = group[0]
    nbytes = max(read.offset + read.nbytes for read in group) - first.offset
    crc32c = next((read.crc32c for read in group if read.crc32c is not None), None)
    decoded = max(read.decoded_nbytes for read in group)  # they are decoded one after another
    spread = partial(_scatter, group)
    return ScatterRead(first.leaf, first.file, first.offset, nbytes, spread, crc32c, decoded_nbytes=decoded)


def _scatter(group: Sequence[ScatterRead], data: memoryview) -> None:
    start = group[0].offset
    for read in group:
        read.scatter(data[read.offset - start : read.offset - start + read.nbytes])


def _is_joined(read: Read) -> TypeGuard[ScatterRead]:
    """Whether a read may be joined: it is a scattered read, not empty, and its bytes are not opaque."""
    return isinstance(read, ScatterRead) and bool(read.nbytes) and read.opaque is None
