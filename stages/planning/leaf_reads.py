"""Plans the reads of a leaf: turns the target of its handler into ranges of files. Reads no array bytes.

`plan_reads` serves whole leaves, leaves with a new dtype or shape, and parts of large leaves alike.
"""

from __future__ import annotations

__all__ = ("in_parts", "plan_reads", "scratch_bytes")

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from penstock.kernel.messages.packs import PartOf, ReadLeaf
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.leaf_handlers import PartsHandler
from penstock.kernel.protocols.reads import CheckedRead, DirectRead, DriverRead, Read, ScatterRead, Target
from penstock.kernel.protocols.shared_checks import narrowed, share_checks
from penstock.stages.planning.coalescing import join_reads

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
    nobody needs are read by nobody.
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

    return [_narrowed(leaf) for leaf in cut]


def _narrowed(leaf: ReadLeaf) -> ReadLeaf:
    reads = narrowed(leaf.reads)
    return leaf if reads is leaf.reads else replace(leaf, reads=reads)


def scratch_bytes(reads: Sequence[Read]) -> int:
    """Return the bytes of the intermediate buffers that reads need."""
    return sum([read.scratch_nbytes for read in reads])


def _is_whole(read: Read) -> bool:
    """Whether it reads a whole chunk, since a codec or a stage makes chunks indivisible."""
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
