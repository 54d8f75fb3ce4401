"""Verification: whether a stored checkpoint is still what was written."""

from __future__ import annotations

__all__ = ("VerifyReport", "verify_checkpoint")

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from anyio import CapacityLimiter, create_task_group

from penstock.handlers.formats.auto_layout import is_safetensors
from penstock.handlers.formats.orbax.reading.open_checkpoint import open_checkpoint
from penstock.handlers.formats.orbax.reading.verification import (
    BLOCK_BYTES,
    Damage,
    RecordedRange,
    check_ranges,
    survey,
)
from penstock.handlers.formats.orbax.reading.verification import Survey as _Survey
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.protocols.stores import Store

CONCURRENCY = 2
GROUP_BYTES = 64 * 2**20
GROUP_RANGES = 4096


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of comparing a stored checkpoint with its checksums."""

    path: str
    n_leaves: int
    n_ranges: int  #: whose checksum was compared
    nbytes: int  #: in those ranges
    damages: tuple[Damage, ...] = field(repr=False)  #: by file and offset; empty if nothing is damaged
    unchecked: tuple[str, ...] = ()  #: key paths of leaves that have bytes without a recorded checksum

    @property
    def intact(self) -> bool:
        """Whether every range with a checksum is as it was written."""
        return not self.damages

    @property
    def damaged_leaves(self) -> tuple[str, ...]:
        """Key paths of the damaged leaves, each once."""
        return tuple(dict.fromkeys([name for damage in self.damages for name in damage.key_paths]))


async def verify_checkpoint(
    path: str, store: Store, threads: Threads, memory: MemoryRegulator, item: str | None = None
) -> VerifyReport:
    """Compare every recorded range of the checkpoint at `path`, or of an item of it, with its checksum.

    Raises:
        UnsupportedFormatError: If no checksums were recorded.
        CorruptCheckpointError: If a document is damaged, so that leaves cannot be checked.

    Cancellation:
        Returns once the current reads have ended.
    """
    n_leaves, found = await threads.run(_survey, store, path, item)
    damages = list(found.damages)
    limiter = CapacityLimiter(CONCURRENCY)

    async def check(group: Sequence[RecordedRange]) -> None:
        async with limiter:
            lease = await memory.acquire(min(BLOCK_BYTES, memory.limit))
            try:
                damages.extend(await threads.run(check_ranges, store, group))
            finally:
                lease.release()

    async with create_task_group() as checking:
        for group in _groups(found.ranges):
            checking.start_soon(check, group)

    damages.sort(key=lambda damage: (damage.file, damage.offset))
    nbytes = sum(part.checksum.nbytes for part in found.ranges)
    return VerifyReport(path, n_leaves, len(found.ranges), nbytes, tuple(damages), found.unchecked)


def _survey(store: Store, path: str, item: str | None) -> tuple[int, _Survey]:
    if is_safetensors(store, path):
        raise UnsupportedFormatError(path, "is safetensors, which records no checksums")

    checkpoint = open_checkpoint(store, path, item, whole=False)
    return len(checkpoint.leaves), survey(checkpoint)


def _groups(ranges: Sequence[RecordedRange]) -> Iterator[list[RecordedRange]]:
    """Yield what one thread checks at a time: ranges of one file, bounded in number and in bytes."""
    group: list[RecordedRange] = []
    nbytes = 0
    for found in ranges:
        full = nbytes + found.checksum.nbytes > GROUP_BYTES or len(group) == GROUP_RANGES
        if group and (full or found.file != group[0].file):
            yield group
            group, nbytes = [], 0

        group.append(found)
        nbytes += found.checksum.nbytes

    if group:
        yield group
