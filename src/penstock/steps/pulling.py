"""Brings a step that a keeper holds to another place: `penstock keeper pull`.

A keeper may have it whole, or in parts: those that the processes of a job on its host saved, and those that
peers have sent. Whose parts they are is in their marks, so one process can put them together.
"""

from __future__ import annotations

__all__ = ("HeldRun", "pull_step", "runs_in")

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.publishing.paths import KEEPER_HOST, inside_of_process
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import NotACheckpointError
from penstock.kernel.memory.regulator import MemoryRegulator
from penstock.kernel.protocols.coordinator import SoleOperation
from penstock.kernel.protocols.stores import Store
from penstock.steps.joint_tiers import FoundPart, find_parts, newest_whole, places_beside
from penstock.steps.step_directory import StepReader, find_steps
from penstock.steps.step_names import StepNames
from penstock.steps.tier_record import TierRecord, read_record
from penstock.verification.copying import COPY_WORKERS, CheckpointCopier, CopySource

_URL: Final = f"keeper://{KEEPER_HOST}/"


@final
@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run of which a keeper has steps.

    Attributes:
        path: Its directory in the keeper, that of a process alone.
        root: That its steps go to; None if no record says so.
        whole: Its whole steps, by number.
        parts: Of steps that several processes saved.
    """

    path: str
    root: str | None
    whole: Mapping[int, str] = field(default_factory=dict[int, str])
    parts: Sequence[FoundPart] = ()

    def sources(self, step: int) -> Mapping[int, str] | None:
        """Return what a step can be made of: the path of each part, or of all; None if it cannot be."""
        if step in self.whole:
            return {0: self.whole[step]}

        found = newest_whole({0: [part for part in self.parts if part.step == step]}, -1)
        return None if found is None else found.bring[0]

    @property
    def steps(self) -> Sequence[int]:
        """The steps that can be brought elsewhere, ascending."""
        numbers = {*self.whole, *[part.step for part in self.parts]}
        return sorted([step for step in numbers if self.sources(step) is not None])

    def lacks(self, step: int) -> str:
        """Return why a step cannot be brought elsewhere, in words."""
        here = sorted({part.process for part in self.parts if part.step == step})
        of = max([part.processes for part in self.parts if part.step == step], default=())
        if not here:
            return f"has no step {step} (its steps: {', '.join(map(str, self.steps)) or 'none'})"

        missing = ", ".join([str(process) for process in of if process not in here])
        return f"has parts of step {step}, but none of process {missing} of {len(of)}: its keeper has it"


def runs_in(store: KeeperStore) -> Sequence[HeldRun]:
    """Return the runs of which a keeper has steps. Blocking.

    Raises:
        KeeperLostError: If there is none.
    """
    inside: set[str] = set()
    for step in store.status().steps:
        folder = f"{_URL}{os.path.dirname(step.path)}"
        own = inside_of_process(folder)
        inside.add(folder if own is None else f"{_URL}{own}")

    found = [_run_at(store, path) for path in sorted(inside)]
    return [run for run in found if run.whole or run.parts]


def _run_at(store: KeeperStore, path: str) -> HeldRun:
    reader, record = StepReader(store), _record(store, [path, *places_beside(store, path)])
    names = StepNames() if record is None or record.names is None else record.names
    there = find_steps(store, path, names)
    at = {step: f"{path}/{name}" for step, name in there.items()}
    whole = {step: place for step, place in at.items() if not reader.is_part(place)}
    parts = find_parts(store, path, names, whole.values())
    return HeldRun(path, None if record is None else record.root or None, whole, parts)


def _record(store: Store, places: Collection[str]) -> TierRecord | None:
    records = [read_record(store, place) for place in places]
    return next((record for record in records if record is not None), None)


async def pull_step(
    store: KeeperStore,
    run: HeldRun,
    step: int,
    target: Store,
    destination: str,
    memory: MemoryRegulator,
    on_progress: Callable[[int], object] = lambda _: None,
) -> int:
    """Copy a step from a keeper to `destination`, where it appears in one step, durable.

    Every recorded checksum is compared on the way. Of parts, one checkpoint is made. If it is where the step
    belongs, the keeper hears that it is elsewhere.

    Args:
        store: Of the keeper.
        run: One of `runs_in`.
        step: One of its steps.
        target: Where it goes.
        destination: The path there; nothing may be there.
        memory: Leases what is copied at a time.
        on_progress: Called with the bytes copied so far, in a worker thread; not for parts.

    Returns:
        The bytes copied.

    Raises:
        NotACheckpointError: If the keeper cannot make the step.
        DestinationExistsError: If something is at the destination.
        CorruptCheckpointError: If what the keeper has is damaged.
        KeeperLostError, StorageError: If a medium refuses. Nothing is left then.

    Cancellation:
        Nothing is left at the destination.
    """
    sources = run.sources(step)
    if sources is None:
        raise NotACheckpointError(run.path, run.lacks(step))

    threads = Threads(COPY_WORKERS)
    copier = CheckpointCopier(store, target, threads, memory)
    if step in run.whole:
        nbytes = await copier.copy(run.whole[step], destination, on_progress=on_progress)
    else:
        parts = {process: CopySource(store, path) for process, path in sources.items()}

        async def nothing() -> None:
            """Do nothing: the copy holds the parts."""

        operation = SoleOperation(destination)
        nbytes = await copier.copy_together(
            operation, parts, destination, processes=tuple(sorted(parts)), prepare=nothing
        )

    if os.path.dirname(destination) == run.root:
        for path in sources.values():
            await threads.run(store.note_elsewhere, path)

    return nbytes
