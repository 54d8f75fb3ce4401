"""Decides which steps to delete when a new one is durable."""

from __future__ import annotations

__all__ = ("Retention",)

import time
from dataclasses import replace
from functools import partial
from typing import final

from anyio import Event

from penstock.checkpointer.engine import Engine
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import ClosedError, PenstockError
from penstock.steps.catalogue import Catalogue
from penstock.steps.keep_policies import KeepAll, StepInfo, steps_to_delete
from penstock.steps.opened_root import OpenedRoot, RootOptions
from penstock.steps.step_deletion import Deleter


@final
class Retention:
    """Removes from the catalogue the steps that a policy does not keep. Used in the event loop.

    Args:
        catalogue: The steps that exist.
        opened: The root, held by this process or another one of the job, and the steps that are pinned.
        engine: Of the Checkpointer that saves.
        root: The directory of steps.
        threads: Run the policy, and read what it looks at; a cancellation may leave them.
        options: Which steps stay, and what becomes of the others.
    """

    __slots__ = (
        "_catalogue",
        "_is_owed",
        "_job",
        "_note",
        "_outcomes",
        "_policy",
        "_threads",
        "deleter",
        "pins",
    )

    def __init__(
        self,
        catalogue: Catalogue,
        opened: OpenedRoot,
        engine: Engine,
        root: str,
        threads: Threads,
        options: RootOptions,
    ) -> None:
        self._catalogue = catalogue
        self._job = opened.job
        self._policy = options.keep
        self._is_owed = options.is_owed
        self._note = partial(engine.report_keeper.note, root)
        self._threads = threads
        self._outcomes: dict[int, tuple[Event, list[PenstockError]]] = {}
        self.pins = opened.pins  #: steps that stay whatever the policy says
        self.deleter = Deleter(
            engine.store,
            threads,
            root,
            trash=options.trash,
            events=engine.events,
            on_outcome=self._note_outcome,
            hold=opened.held,
            deletes=opened.holds,
            is_patient=options.is_shared,
        )

    async def apply(self, saved: int, *, is_overtaken: bool = False) -> None:
        """Decide which steps to delete, now that one is durable; that step and the last one stay.

        Args:
            saved: The step.
            is_overtaken: Whether a later step, whose save began after this one's, was durable first. Then the
                policy decides about this one as about any other.

        Raises:
            Exception: What the policy raises.
            PeerSilentError: If the primary does not say which.
        """
        if isinstance(self._policy, KeepAll):
            return

        failure: Exception | None = None

        async def deletable() -> list[int]:
            nonlocal failure
            try:
                return await self._deletable(saved, is_overtaken)
            except Exception as error:  # then the others delete nothing, and only this process raises
                failure = error
                return []

        self.deleter.ask(self._catalogue.remove(await self._job.decide(f"delete after {saved}", deletable)))
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # the traceback refers to this frame

    async def _deletable(self, saved: int, is_overtaken: bool) -> list[int]:
        steps = self._catalogue.snapshot()
        stay: set[int] = set() if is_overtaken else {saved}
        doomed = await self._threads.run(self._decide, steps, stay)
        # Pins as of now. A step that came since was not part of the decision and stays.
        return [
            step
            for step in doomed
            if step not in self.pins and step != self._catalogue.latest and not self._waits(step)
        ]

    def _waits(self, step: int) -> bool:
        """True if a step must not go yet, since it is copied to another tier."""
        return self._is_owed is not None and self._is_owed(step)

    async def delete(self, step: int) -> None:
        """Delete a step and return when it is gone. While a reader on this machine holds it, it stays.

        Raises:
            StorageError: If it could not be deleted; then it is still there.
            RootInUseError: If another manager holds the root, which this one could not hold before.
            ClosedError: If the manager was left before it could be.

        Cancellation:
            The step will be deleted nevertheless.
        """
        event, problems = self._outcomes.setdefault(step, (Event(), []))
        self.deleter.ask(self._catalogue.remove([step]))
        await event.wait()
        if problems:
            raise problems[0]

    async def forget(self, step: int) -> None:
        """Cancel the deletion of a step that is saved again; wake the tasks that wait for it.

        If the step is being deleted already, return when that is over.
        """
        if step in self.deleter.waiting:
            await self.deleter.forget(step)
            event, _ = self._outcomes.pop(step, (Event(), []))
            event.set()

    def end(self) -> None:
        """Begin no deletion any more; a caller that waits for one hears that it was not done."""
        self.deleter.end()
        for step, (event, problems) in self._outcomes.items():
            problems.append(
                ClosedError(f"the CheckpointManager was left before step {step} could be deleted")
            )
            event.set()

    def _note_outcome(self, step: int, name: str, problem: PenstockError | None) -> None:
        """Take the outcome of a deletion from the deleter."""
        event, problems = self._outcomes.pop(step, (Event(), []))
        if problem is not None:
            self._catalogue.add(step, name)
            problems.append(problem)

        self._note("deleted" if problem is None else "deletion failed", name, str(problem or ""))
        event.set()

    def _decide(self, steps: dict[int, str], stay: set[int]) -> list[int]:
        """Ask the policy. Before anything is deleted, what only looks like a step is left out, and stays."""
        infos: list[StepInfo] = self._catalogue.infos(steps, self._policy.needs)
        doomed = steps_to_delete(self._policy, infos, time.time(), stay)
        if not doomed:
            return []

        counted = {info.step: steps[info.step] for info in infos if info.is_readable}
        lost = self._catalogue.not_whole(counted)
        infos = [replace(info, is_readable=False) if info.step in lost else info for info in infos]
        return steps_to_delete(self._policy, infos, time.time(), stay) if lost else doomed
