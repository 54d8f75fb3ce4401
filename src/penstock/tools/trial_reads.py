"""Reads leaves on trial: a leaf whose bytes were compared with nothing may turn out not to be readable."""

from __future__ import annotations

__all__ = ("try_leaves",)

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from penstock.handlers.formats.leaf_table import StoredArray
from penstock.handlers.formats.verification import Finding, finding_of
from penstock.handlers.leaves.stored_value import SourceFiles, StoredValue, StoredValueHandler
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PenstockError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.messages.save import Leaf
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.leaf import StoredLeaf

_HANDLER: Final = StoredValueHandler()
_AT_ONCE: Final = 64
"""Leaves read in one call of a thread, if all of them are small."""


async def try_leaves(
    opened: StoredCheckpoint,
    leaves: Sequence[StoredLeaf],
    files: SourceFiles,
    threads: Threads,
    memory: MemoryRegulator,
    piece_bytes: int,
) -> list[Finding]:
    """Read leaves as they would be saved, piece by piece, and say which cannot be.

    Args:
        opened: The tree that they belong to.
        leaves: Which of its leaves.
        files: Opens its files.
        threads: For reading.
        memory: The budget, of which one piece is leased.
        piece_bytes: Of a piece.

    Cancellation:
        Returns when the current group is read.
    """
    findings: list[Finding] = []
    remaining = iter(leaves)
    while group := list(islice(remaining, _AT_ONCE)):
        largest = max(_piece_bytes(leaf, piece_bytes) for leaf in group)
        lease = await memory.acquire(largest, admit_oversize=True)
        try:
            findings += await threads.run(_try, opened, group, files, piece_bytes)
        finally:
            lease.release()

    return findings


def _piece_bytes(leaf: StoredLeaf, piece_bytes: int) -> int:
    """Return the bytes of a leaf that are held at once: a chunk with a codec cannot be cut."""
    array, spec = leaf.detail, leaf.spec
    coded = isinstance(array, StoredArray) and not array.format.plain
    return min(spec.nbytes, max(piece_bytes, spec.chunk_nbytes if coded else 0))


def _try(
    opened: StoredCheckpoint, leaves: Iterable[StoredLeaf], files: SourceFiles, piece_bytes: int
) -> list[Finding]:
    findings: list[Finding] = []
    for leaf in leaves:
        value = StoredValue(files, opened, leaf)
        try:
            spec = _HANDLER.describe(value, leaf.info)
            for piece in _HANDLER.pieces(Leaf(0, leaf.info, value, spec, _HANDLER), piece_bytes):
                piece.take()
        except PenstockError as error:
            found = finding_of(error, opened.path)
            findings.append(replace(found, kind="damaged", key_paths=(leaf.info.key_path,)))

    return findings
