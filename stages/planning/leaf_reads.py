"""Plans the reads of a leaf: turns the target of its handler into ranges of files. Reads no array bytes.

`plan_reads` serves whole leaves, leaves with a new dtype or shape, and parts of large leaves alike. Reads of
neighbouring ranges become one (`join_reads`), and values of medium size share memory (`join_memory`).
"""

from __future__ import annotations

__all__ = ("check_plain", "in_parts", "join_memory", "join_reads", "plan_reads", "scratch_bytes")

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeGuard

from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.leaf_handlers import PartOf, PartsHandler, ReadLeaf
from penstock.kernel.protocols.reads import (
    CheckedRead,
    DirectRead,
    DriverRead,
    JoinsMemory,
    Read,
    ScatterRead,
    Target,
    TileRead,
    narrowed,
    share_checks,
)
from penstock.stages.messages.batching import grouped

SHARE: Final = 2
"""A leaf that would hold more than 1/SHARE of the budget is split into parts. JAX compiles a program for
each shape of a part, so splitting is avoided where possible; but others use the budget, too, and it may
shrink."""


def plan_reads(
    checkpoint: StoredCheckpoint, index: int, stored: StoredLeaf, target: Target, piece_bytes: int
) -> tuple[Read, ...]:
    """Plan the reads that fill the regions of a target. Bytes that several regions need are read once.

    Args:
        checkpoint: The checkpoint that stores the leaf.
        index: The value of `Read.leaf`.
        stored: The leaf.
        target: The regions that its handler wants.
        piece_bytes: Upper bound for one read, unless a codec makes a chunk indivisible.

    Raises:
        CorruptCheckpointError: If chunks that were recorded as written are missing.
    """
    reads = tuple(
        [read for region in target.regions for read in checkpoint.reads(index, stored, region, piece_bytes)]
    )
    return join_reads(reads, piece_bytes) if len(target.regions) > 1 else reads


def in_parts(
    run: RestoreRun, checkpoint: StoredCheckpoint, leaves: Sequence[ReadLeaf], *, mmap: bool = False
) -> list[ReadLeaf]:
    """Split the leaves that would hold too much of the memory budget into parts.

    A leaf that is read straight into the memory of its value holds no budget and is never split. A leaf
    that its handler cannot split stays whole, and is admitted alone. What parts of one leaf need of one
    checksummed range is read once, unless leaves are to be mapped: then some of it is never read. Blocks that
    are not needed are not read.
    """
    most = run.memory.limit_of(run.flow) // SHARE
    numbers = itertools.count(-1, -1)
    cut: list[ReadLeaf] = []
    for leaf in leaves:
        held = leaf.target.staging_bytes
        if held and held + scratch_bytes(leaf.reads) > most and isinstance(leaf.handler, PartsHandler):
            parts = _parts(run, checkpoint, leaf, leaf.handler, most, numbers.__next__)
            cut += parts if mmap else _read_once(parts)
        else:
            cut.append(leaf)

    for at, leaf in enumerate(cut):
        reads = narrowed(leaf.reads)
        if reads is not leaf.reads:
            cut[at] = replace(leaf, reads=reads)

    return cut


def scratch_bytes(reads: Sequence[Read]) -> int:
    """Return the bytes of the intermediate buffers that reads need."""
    return sum([read.scratch_nbytes for read in reads])


def _is_whole(read: Read) -> bool:
    """Return whether it reads a whole chunk, since a codec or a stage makes chunks indivisible."""
    if isinstance(read, TileRead):
        return any(map(_is_whole, read.reads))

    encoded = isinstance(read, ScatterRead) and (read.opaque is not None or bool(read.decoded_nbytes))
    return encoded or isinstance(read, DriverRead)


def _parts(
    run: RestoreRun,
    checkpoint: StoredCheckpoint,
    leaf: ReadLeaf,
    handler: PartsHandler,
    most: int,
    next_number: Callable[[], int],
) -> list[ReadLeaf]:
    piece_bytes = min(run.limits.piece_bytes, max(1, most // SHARE))
    whole_chunks = any(map(_is_whole, leaf.reads))
    held = leaf.target.staging_bytes + scratch_bytes(leaf.reads)
    # Intermediate buffers count, too. A checksum covers a whole piece, as it was written.
    part_bytes = max(1, piece_bytes * leaf.target.staging_bytes // held)
    written = max([read.nbytes for read in leaf.reads if _is_checked(read)], default=0)
    if part_bytes < written <= most:
        part_bytes = written

    targets = handler.parts(leaf.stored, leaf.target, part_bytes, whole_chunks=whole_chunks)
    if len(targets) < 2:
        return [leaf]

    parts: list[ReadLeaf] = []
    for at, target in enumerate(targets):
        number = next_number()
        reads = plan_reads(checkpoint, number, leaf.stored, target, piece_bytes)
        part = PartOf(leaf.index, at, len(targets))
        parts.append(replace(leaf, index=number, target=target, reads=reads, part=part))

    return parts


def _read_once(parts: Sequence[ReadLeaf]) -> list[ReadLeaf]:
    """Cut ranges that several parts need between them. The leaf is joined when all parts were read."""
    shared = share_checks([part.reads for part in parts])
    return [replace(part, reads=reads) for part, reads in zip(parts, shared, strict=True)]


def _is_checked(read: Read) -> bool:
    whole = isinstance(read, DirectRead) and read.crc32c is not None
    return whole or isinstance(read, CheckedRead)


def check_plain(reads: Iterable[Read]) -> None:
    """Refuse reads of opaque chunks.

    Raises:
        UnsupportedFormatError: It names the codec, and the leaf.
    """
    for read in reads:
        if isinstance(read, TileRead):
            check_plain(read.reads)
        elif isinstance(read, ScatterRead) and read.opaque is not None:
            problem = f"holds chunks that a stage made opaque: {read.opaque.codec!r}"
            advice = "restore with the stage that undoes it, behind `plan` in the pipeline, and without mmap"
            raise UnsupportedFormatError(read.file, f"{problem}; {advice}", key_path=read.opaque.key_path)


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
    """Read a range that several regions share once."""
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
    """Return whether a read may be joined: a scattered read, not empty, whose bytes are not opaque."""
    return isinstance(read, ScatterRead) and bool(read.nbytes) and read.opaque is None


LEAST: Final = 64 * 1024
"""Bytes. What is smaller is read in packs, or costs less than its share of a page."""

OWN_FROM: Final = 4 * 2**20
"""Bytes. What is larger has huge pages of its own. Without them each 4 KiB costs a page fault, which takes
twice as long as reading them."""

TOGETHER: Final = 16 * 2**20
"""Bytes of one allocation: what the last of its leaves may keep from the system."""


def join_memory(leaves: Sequence[ReadLeaf]) -> None:
    """Have neighbouring leaves of medium size share allocations, if their values keep the memory."""
    by_class: dict[type, list[JoinsMemory]] = {}
    for leaf in leaves:
        if leaf.target.staging_bytes:
            continue
        for region in leaf.target.regions:
            if isinstance(region, JoinsMemory) and LEAST <= region.nbytes < OWN_FROM:
                by_class.setdefault(type(region), []).append(region)

    for alike in by_class.values():
        for group in grouped(alike, TOGETHER):
            if len(group) > 1:
                group[0].join(group[1:])
