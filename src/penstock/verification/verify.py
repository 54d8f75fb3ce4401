"""Verification: compares everything under a path with the checksums of what was written."""

from __future__ import annotations

__all__ = (
    "Status",
    "Verification",
    "VerifyReport",
    "compare_ranges",
)

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Final, Literal, TypeAlias, final

from anyio import CapacityLimiter

from penstock.handlers.formats.verification import (
    Finding,
    RecordedRange,
    block_bytes,
    check_ranges,
    finding_of,
)
from penstock.handlers.layouts.discovery import find_checkpoints
from penstock.handlers.stores.publishing.reading import Reading, Snapshots, read_unchanged
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PenstockError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.pipeline.together import together
from penstock.kernel.protocols.stores import Store
from penstock.verification.checkpoint_survey import CheckpointSurvey, compare_documents, survey_checkpoint

Status: TypeAlias = Literal["intact", "damaged", "unreadable", "absent", "unchecked"]
"""`"intact"`: all of it was compared, and is as it was written. `"damaged"`: something is not. Else, in this
order: the medium refused to read something; there is no checkpoint; something could not be compared."""

_WORST_FIRST: Final[tuple[Status, ...]] = ("damaged", "unreadable", "absent", "unchecked")


@final
@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of comparing everything under a path with the checksums that were recorded of it."""

    path: str
    checkpoints: tuple[str, ...]  #: paths of all finished checkpoints there, steps among them
    n_leaves: int  #: in all items of all checkpoints
    n_ranges: int  #: whose checksum was compared
    n_documents: int  #: whose digest was compared
    nbytes: int  #: in those ranges and documents
    findings: tuple[Finding, ...] = field(default=(), repr=False)
    """What is not as it was written, or cannot be compared; by file and offset."""
    leftovers: tuple[str, ...] = ()
    """Paths that an interrupted save or deletion left there. They belong to no checkpoint."""

    @property
    def status(self) -> Status:
        """The worst of the findings; see `Status`."""
        kinds = {finding.kind for finding in self.findings}
        for status in _WORST_FIRST:
            if status in kinds:
                return status

        return "intact"

    @property
    def intact(self) -> bool:
        """True if everything was compared, and everything is as it was written."""
        return self.status == "intact"

    @property
    def damages(self) -> tuple[Finding, ...]:
        """The ranges that are not as they were written."""
        return self._of("damaged")

    @property
    def unreadable(self) -> tuple[Finding, ...]:
        """The ranges that the medium refused to read, so that nothing is known about them."""
        return self._of("unreadable")

    @property
    def unchecked(self) -> tuple[Finding, ...]:
        """The ranges that could be read and have no checksum to compare with."""
        return self._of("unchecked")

    @property
    def damaged_leaves(self) -> tuple[str, ...]:
        """Key paths of the damaged leaves, each once."""
        return tuple(dict.fromkeys([name for damage in self.damages for name in damage.key_paths]))

    def _of(self, kind: str) -> tuple[Finding, ...]:
        return tuple([finding for finding in self.findings if finding.kind == kind])


CONCURRENCY: Final = 2
# So much is in memory at a time, outside of the budget.
GROUP_BYTES: Final = 64 * 2**20
GROUP_RANGES: Final = 4096


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """Compares checkpoints at rest with their checksums.

    Args:
        store: Where they are.
        threads: For blocking calls.
        memory: Leases the buffers.
        views: Snapshots of checkpoints, of a store that makes some.
    """

    store: Store
    threads: Threads
    memory: MemoryRegulator
    views: Snapshots = field(default_factory=Snapshots)

    async def verify(self, path: str, item: str | None = None) -> VerifyReport:
        """Compare everything at and below `path`, or one item of the checkpoint there.

        Nothing is raised for what is found, be it damage or nothing at all: the report says it.

        Cancellation:
            Returns once the current reads have ended.
        """
        async with self.views.of(self.store, self.threads, path) as view:  # in use until all is compared
            return await self._verify(view, path, item)

    async def _verify(self, store: Store, path: str, item: str | None) -> VerifyReport:
        found = await self.threads.run(find_checkpoints, store, path)
        findings, checkpoints = list(found.findings), list[str]()
        n_leaves = n_ranges = n_documents = nbytes = 0
        for checkpoint in found.checkpoints:
            try:
                compare = partial(self._compare, checkpoint, item)
                survey = await read_unchanged(self.store, self.threads, checkpoint, compare, views=self.views)
            except PenstockError as error:
                checkpoints.append(checkpoint)
                findings.append(finding_of(error, checkpoint))
                continue

            if survey.findings and await self.threads.run(self.store.kind, checkpoint) is None:
                continue  # it was deleted meanwhile, as by the policy of a run that goes on

            checkpoints.append(checkpoint)
            findings += survey.findings
            n_leaves += survey.n_leaves
            n_ranges += len(survey.ranges)
            n_documents += survey.n_documents
            nbytes += sum(part.checksum.nbytes for part in survey.ranges)

        for folder in found.root_folders:
            names, problems = await read_unchanged(
                self.store, self.threads, folder, partial(self._compare_documents, folder)
            )
            n_documents += len(names)
            findings += problems

        findings.sort(key=attrgetter("file", "offset"))
        return VerifyReport(
            path=path,
            checkpoints=tuple(checkpoints),
            n_leaves=n_leaves,
            n_ranges=n_ranges,
            n_documents=n_documents,
            nbytes=nbytes,
            findings=tuple(findings),
            leftovers=tuple(found.leftovers),
        )

    async def _compare(self, path: str, item: str | None, source: Reading) -> CheckpointSurvey:
        """Survey one checkpoint, and add to its findings what its bytes say."""
        survey = await self.threads.run(survey_checkpoint, source.store, path, item)
        survey.findings += await compare_ranges(source.store, self.threads, self.memory, survey.ranges)
        return survey

    async def _compare_documents(self, folder: str, _: Reading) -> tuple[Collection[str], Sequence[Finding]]:
        return await self.threads.run(compare_documents, self.store, folder)


async def compare_ranges(
    store: Store, threads: Threads, memory: MemoryRegulator, ranges: Sequence[RecordedRange]
) -> list[Finding]:
    """Read ranges, those of one file next to each other, and compare each with its checksum.

    Cancellation:
        Returns once the current reads have ended.
    """
    limiter = CapacityLimiter(CONCURRENCY)

    async def check(group: Sequence[RecordedRange]) -> Sequence[Finding]:
        async with limiter:
            lease = await memory.acquire(min(block_bytes(store), memory.limit))
            try:
                return await threads.run(check_ranges, store, group)
            finally:
                lease.release()

    found = await together([partial(check, group) for group in _groups(ranges)])
    return list(chain.from_iterable(found))


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
