"""Compares what a restore would take with what is stored, and with the memory there is, in advance."""

from __future__ import annotations

__all__ = ("ResultBytes", "check_expansion")

from collections.abc import Sequence
from typing import final

import jax

from penstock.kernel.errors import ExpansionError, InsufficientMemoryError
from penstock.kernel.memory.memory_limit import FREE_BYTES, check_available, free_memory
from penstock.kernel.protocols.checkpoints import StoredCheckpoint, StoredSize
from penstock.kernel.protocols.leaf_handlers import ReadLeaf
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.stores import Store
from penstock.stages.planning.leaf_sources import spec_column


def check_expansion(store: Store, checkpoint: StoredCheckpoint, rows: Sequence[int], most: int) -> None:
    """Refuse leaves that claim far more bytes than the whole checkpoint has. Blocking.

    Args:
        store: Where it lies.
        checkpoint: Which checkpoint.
        rows: Places of the leaves to read.
        most: How many times the bytes stored they may take.

    Raises:
        ExpansionError: Names the largest leaf.
    """
    specs = spec_column(checkpoint.leaves)
    chosen = [specs[row] for row in rows]
    known = {id(spec): spec.claimed_nbytes for spec in {id(spec): spec for spec in chosen}.values()}
    claimed = sum([known[id(spec)] for spec in chosen])
    if claimed <= FREE_BYTES or not isinstance(checkpoint, StoredSize):
        return

    stored = checkpoint.stored_bytes(store)
    if claimed > most * stored:
        largest = max(rows, key=lambda row: specs[row].claimed_nbytes)
        key_path = checkpoint.leaves[largest].info.key_path
        raise ExpansionError(checkpoint.path, stored, claimed, most, key_path)


@final
class ResultBytes:
    """Adds up the host memory that a result will take, and compares it with what there is.

    Args:
        path: The checkpoint, for the error.
    """

    __slots__ = ("_free", "_on_host", "_path", "_total")

    def __init__(self, path: str) -> None:
        self._path = path
        self._total = 0
        self._free: int | None = None
        self._on_host: bool | None = None

    def add_target(self, key_path: str, target: Target) -> None:
        """Count the regions of a leaf, unless their bytes only pass through the host."""
        nbytes = sum([region.nbytes for region in target.regions])
        if target.staging_bytes and nbytes > FREE_BYTES:
            if self._on_host is None:
                self._on_host = jax.default_backend() == "cpu"
            if not self._on_host:
                return

        self.add(key_path, nbytes)

    def add(self, key_path: str, nbytes: int) -> None:
        """Count bytes that will be held.

        Raises:
            InsufficientMemoryError: If all that were counted are more than there are.
        """
        self._total += nbytes
        if self._total <= FREE_BYTES:
            return
        if self._free is None:
            self._free = free_memory()
        if self._total > self._free:
            raise InsufficientMemoryError(self._path, self._total, self._free, key_path)

    def add_reads(self, leaf: ReadLeaf) -> None:
        """Compare the largest buffer that a read of a leaf needs, such as a chunk, with what there is."""
        scratch = max([read.scratch_nbytes for read in leaf.reads], default=0)
        check_available(self._path, scratch, leaf.stored.info.key_path)
