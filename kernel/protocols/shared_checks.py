"""Has several reads share the comparison of one range, so that its bytes are read once. Pure."""

from __future__ import annotations

__all__ = ("share_checks",)

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.kernel.protocols.reads import CheckedRead, Combine, Read, Segment, SharedRange


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


def _segments(reads: Sequence[CheckedRead], combine: Combine) -> Iterator[CheckedRead]:
    """Give each read of a range the bytes up to the end of what it keeps; the last one all that follow."""
    start, end = reads[0].offset, reads[0].offset + reads[0].nbytes
    edges = [start]
    for read in reads:
        edges.append(max(edges[-1], *[part.offset + part.nbytes for part in read.parts]))

    edges[-1] = end
    sizes = [stop - at for at, stop in itertools.pairwise(edges)]
    whole = SharedRange(start, sizes, reads[0].crc32c, combine)
    for number, (read, at, nbytes) in enumerate(zip(reads, edges[:-1], sizes, strict=True)):
        yield replace(read, offset=at, nbytes=nbytes, segment=Segment(whole, number))
