"""Decides which bytes are read of a range with a checksum of which only a part is kept. Pure.

Parts of a value that need one share its comparison, so that its bytes are read once. Where the checksums
of its blocks are known, blocks that nobody needs are not read.
"""

from __future__ import annotations

__all__ = ("narrowed", "share_checks")

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.kernel.protocols.reads import (
    CheckedRead,
    Combine,
    DirectRead,
    Read,
    RunningChecksums,
    ScatterRead,
    Segment,
    SharedRange,
)


def share_checks(groups: Sequence[Sequence[Read]]) -> list[tuple[Read, ...]]:
    """Cut each range of which several reads keep a part into segments, one for each of them.

    A range is compared when the last of its segments was read. So the value that is made of the groups must
    not be given to anybody before all of them were.

    Args:
        groups: The reads of each part of one value, to be performed in any order.

    Returns:
        The same groups. What nobody keeps of a range is read once, with the segment that it lies in.
    """
    found = [list(group) for group in groups]
    users: dict[tuple[str, int, int, int], list[tuple[int, int]]] = {}
    for number, group in enumerate(groups):
        for at, read in enumerate(group):
            if isinstance(read, CheckedRead) and read.segment is None:
                key = (read.file, read.offset, read.nbytes, read.crc32c)
                users.setdefault(key, []).append((number, at))

    for places in users.values():
        reads = [read for number, at in places if isinstance(read := groups[number][at], CheckedRead)]
        combine = reads[0].combine
        if len(reads) > 1 and combine is not None:
            order = sorted(range(len(reads)), key=lambda at: reads[at].parts[0].offset)
            for at, segment in zip(order, _segments([reads[at] for at in order], combine), strict=True):
                number, place = places[at]
                found[number][place] = segment

    return list(map(tuple, found))


def narrowed(reads: Sequence[Read]) -> tuple[Read, ...]:
    """Leave out of each range the blocks of which nothing is kept, if the checksums of its blocks are known.

    What remains in one piece is one read, so there may be more of them than before. Do this after reads were
    joined and shared, since those need whole ranges.
    """
    if not any(isinstance(read, CheckedRead) and read.running is not None for read in reads):
        return tuple(reads)

    return tuple([part for read in reads for part in _without_gaps(read)])


def _without_gaps(read: Read) -> Iterator[Read]:
    if not isinstance(read, CheckedRead) or read.segment is not None or read.running is None:
        yield read
        return

    kept: list[DirectRead | ScatterRead] = []
    first = last = 0  # blocks
    for part in sorted(read.parts, key=lambda part: part.offset):
        begins, ends = _blocks(read, read.running, [part])
        if kept and begins > last:
            yield _of_blocks(read, read.running, first, last, kept)
            kept = []

        first, last = (first, max(last, ends)) if kept else (begins, ends)
        kept.append(part)

    yield _of_blocks(read, read.running, first, last, kept)


def _blocks(
    read: CheckedRead, running: RunningChecksums, parts: Sequence[DirectRead | ScatterRead]
) -> tuple[int, int]:
    """Return the first block that parts need, and the one behind the last."""
    start = min([part.offset for part in parts]) - read.offset
    stop = max([part.offset + part.nbytes for part in parts]) - read.offset
    return start // running.block_bytes, -(-stop // running.block_bytes)


def _of_blocks(
    read: CheckedRead,
    running: RunningChecksums,
    first: int,
    last: int,
    parts: Sequence[DirectRead | ScatterRead],
) -> Read:
    """Read some blocks, for these parts."""
    start, nbytes, crc32c = _range(read, running, first, last)
    only = parts[0]
    if len(parts) == 1 and (only.offset, only.nbytes) == (start, nbytes):
        return replace(only, crc32c=crc32c)

    return replace(read, offset=start, nbytes=nbytes, crc32c=crc32c, parts=tuple(parts), running=None)


def _range(read: CheckedRead, running: RunningChecksums, first: int, last: int) -> tuple[int, int, int]:
    """Return where some blocks begin in the file, how many bytes they are, and their checksum."""
    start = first * running.block_bytes
    nbytes = min(last * running.block_bytes, read.nbytes) - start
    before = int(running.crc32cs[first - 1]) if first else 0
    up_to = int(running.crc32cs[last - 1]) if last <= len(running.crc32cs) else read.crc32c
    combine = read.combine
    assert combine is not None, "who knows checksums of blocks can combine them"
    # Of two ranges: the checksum of the first, moved by the length of the second, xor that of the second.
    return read.offset + start, nbytes, up_to ^ combine([(before, start), (0, nbytes)])


def _segments(reads: Sequence[CheckedRead], combine: Combine) -> Iterator[CheckedRead]:
    """Give each read of a range the bytes up to the end of what it keeps; the last one all that follow.

    The range is cut down to the blocks between the first and the last byte that is kept.
    """
    start, nbytes, crc32c = reads[0].offset, reads[0].nbytes, reads[0].crc32c
    if reads[0].running is not None:
        blocks = _blocks(reads[0], reads[0].running, [part for read in reads for part in read.parts])
        start, nbytes, crc32c = _range(reads[0], reads[0].running, *blocks)

    end = start + nbytes
    edges = [start]
    for read in reads:
        edges.append(max(edges[-1], *[part.offset + part.nbytes for part in read.parts]))

    edges[-1] = end
    sizes = [stop - at for at, stop in itertools.pairwise(edges)]
    whole = SharedRange(start, sizes, crc32c, combine)
    for number, (read, at, nbytes) in enumerate(zip(reads, edges[:-1], sizes, strict=True)):
        yield replace(read, offset=at, nbytes=nbytes, segment=Segment(whole, number))
