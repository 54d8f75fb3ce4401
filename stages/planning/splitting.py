"""Cuts leaves that would take too much of the memory budget into parts that pass through it one by one."""

from __future__ import annotations

__all__ = ("in_parts", "scratch_bytes")

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.kernel.messages.restore import PartOf, ReadLeaf
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.leaf_handlers import PartsHandler
from penstock.kernel.protocols.reads import DirectRead, DriverRead, Read, ScatterRead
from penstock.stages.planning.coalescing import join_reads

SHARE = 2
"""What would take more than this part of the budget is cut. Its device needs a program for each shape of a
part, so what passes whole should; but the budget has others to serve, and may become smaller."""


def in_parts(run: RestoreRun, checkpoint: StoredCheckpoint, leaves: Sequence[ReadLeaf]) -> list[ReadLeaf]:
    """Return the leaves, those that hold too many host bytes in parts. Reads no array bytes.

    What is restored into memory that its value keeps holds none, and is never cut. What its handler
    cannot cut stays whole, and is admitted alone.
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
    """Bytes of buffers that the reads go through, and not straight to their place."""
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
    # What reads go through counts, too; and what is checked is a piece as it was written, or none.
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
        reads = tuple(
            read
            for region in target.regions
            for read in checkpoint.reads(number, leaf.stored, region, piece_bytes)
        )
        if len(target.regions) > 1:
            reads = join_reads(reads, piece_bytes)

        part = PartOf(leaf.index, at, len(targets))
        parts.append(replace(leaf, index=number, target=target, reads=reads, part=part))

    return parts


def _is_checked(read: Read) -> bool:
    return isinstance(read, DirectRead) and read.crc32c is not None
