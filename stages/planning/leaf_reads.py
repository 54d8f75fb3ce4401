"""The one planner of reads: from what a handler wants of a leaf to ranges of files. Reads no array bytes.

Whole leaves, leaves that are cast or cut, and parts of large leaves all go through `plan_reads`.
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
from penstock.kernel.protocols.reads import DirectRead, DriverRead, Read, ScatterRead, Target
from penstock.stages.planning.coalescing import join_reads

SHARE: Final = 2
"""A leaf that would hold more than this part of the budget (a half) is cut. The device compiles a program
for each shape of a part, so what can pass whole should; but the budget serves others, too, and may shrink."""


def plan_reads(
    checkpoint: StoredCheckpoint, index: int, stored: StoredLeaf, target: Target, piece_bytes: int
) -> tuple[Read, ...]:
    """Plan the reads that fill the regions of a target. What several regions need is read once.

    Args:
        checkpoint: Where the leaf lies.
        index: What to put into `Read.leaf`.
        stored: The leaf.
        target: What its handler wants.
        piece_bytes: Upper bound for one read, unless a codec makes a chunk indivisible.

    Raises:
        CorruptCheckpointError: If chunks that were recorded as written are missing.
    """
    reads = tuple(
        [read for region in target.regions for read in checkpoint.reads(index, stored, region, piece_bytes)]
    )
    return join_reads(reads, piece_bytes) if len(target.regions) > 1 else reads


def in_parts(run: RestoreRun, checkpoint: StoredCheckpoint, leaves: Sequence[ReadLeaf]) -> list[ReadLeaf]:
    """Return the leaves; those that would hold too much of the memory budget come in parts.

    A leaf that is restored into memory that its value keeps holds nothing of the budget and is never
    cut. A leaf that its handler cannot cut stays whole, and is admitted alone.
    """
    most = run.memory.limit_of(run.flow) // SHARE
    numbers = itertools.count(-1, -1)
    cut: list[ReadLeaf] = []
    for leaf in leaves:
        held = leaf.target.staging_bytes
        if held and held + scratch_bytes(leaf.reads) > most and isinstance(leaf.handler, PartsHandler):
            cut += _parts(run, checkpoint, leaf, leaf.handler, most, numbers.__next__)
        else:
            cut.append(leaf)

    return cut


def scratch_bytes(reads: Sequence[Read]) -> int:
    """Return the bytes of the buffers that reads go through on the way to their place."""
    return sum([read.nbytes for read in reads if not isinstance(read, DirectRead)])


def _is_opaque(read: Read) -> bool:
    return isinstance(read, ScatterRead) and read.opaque is not None


def _parts(
    run: RestoreRun,
    checkpoint: StoredCheckpoint,
    leaf: ReadLeaf,
    handler: PartsHandler,
    most: int,
    next_number: Callable[[], int],
) -> list[ReadLeaf]:
    piece_bytes = min(run.limits.piece_bytes, max(1, most // SHARE))
    whole_chunks = any(isinstance(read, DriverRead) or _is_opaque(read) for read in leaf.reads)
    held = leaf.target.staging_bytes + scratch_bytes(leaf.reads)
    # Buffers that reads go through count, too. A checksum covers a whole piece as it was written.
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


def _is_checked(read: Read) -> bool:
    return isinstance(read, DirectRead) and read.crc32c is not None
