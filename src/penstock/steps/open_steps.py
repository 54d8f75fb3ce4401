"""The durable steps of a root that is open: listed, held, agreed on by all processes, and deleted."""

from __future__ import annotations

__all__ = ("OpenSteps",)

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final, final

from anyio.abc import TaskGroup

from penstock.checkpointer.engine import Engine
from penstock.event_loop.entered_once import own_tasks
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import UnsupportedByStoreError
from penstock.kernel.protocols.store_capabilities import Renames
from penstock.steps.catalogue import Catalogue, StepFiles
from penstock.steps.keep_policies import KeepAll, KeepPolicy
from penstock.steps.opened_root import OpenedRoot, RootOpening
from penstock.steps.retention import Retention
from penstock.steps.save_decisions import JobDecisions
from penstock.steps.step_deletion import Deleter

BUSY_THREADS: Final = 2  # a long deletion must not delay a listing


def _raise(failure: BaseException | None) -> None:
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # the traceback refers to this frame


@final
class OpenSteps:
    """A directory of steps that is open, for every manager of steps. It saves nothing: `StepSaves` does.

    Used in one event loop. A face that calls from another thread changes the catalogue there, one call at a
    time, and has the rest done in the loop.

    Args:
        engine: Of the Checkpointer that saves.
        root: The directory of steps.
        files: Names the steps, finds them, and reads what policies look at.
        keep: Which steps stay.
        trash: A folder for steps that do not stay.
        writes: Whether anything is saved. Who only reads agrees with no other process.
        is_shared: Whether other managers may save there at the same time; see `OpenedRoot`.
        by_number: Whether steps are ordered by number; else in the order in which they came.

    Raises:
        UnsupportedByStoreError: If the store cannot move steps to `trash`.
    """

    def __init__(
        self,
        engine: Engine,
        root: str,
        files: StepFiles,
        *,
        keep: KeepPolicy | None = None,
        trash: str | None = None,
        writes: bool = True,
        is_shared: bool = False,
        by_number: bool = True,
    ) -> None:
        if trash is not None and not isinstance(engine.store, Renames):
            raise UnsupportedByStoreError("move deleted steps in", root, engine.store, Renames)

        stopping = engine.config.stopping
        self._delete_s = stopping.delete_s
        self.store, self.events = engine.store, engine.events
        self.threads = Threads(BUSY_THREADS)
        self.reading = self.threads.leaving_calls(stopping.read_s)  #: for what only reads
        self.root = opened = OpenedRoot(
            engine, root, files, self.threads, self.reading, writes=writes, is_shared=is_shared
        )  #: the directory, and the right to write there
        self.job = JobDecisions(opened.announcements, opened.primary, is_primary=opened.is_primary)
        """What the primary decides for all processes."""
        self.catalogue = Catalogue(
            engine.store, root, files, engine.events, by_number=by_number
        )  #: which steps there are
        self.retention = Retention(
            self.catalogue,
            keep or KeepAll(),
            self.reading,
            opened.announcements,
            is_primary=opened.is_primary,
            pins=opened.pins,
        )  #: which of them go
        self.retention.deleter = Deleter(
            engine.store,
            self.threads.leaving_calls(stopping.read_s),
            root,
            trash=trash,
            events=engine.events,
            on_outcome=self.retention.note_outcome,
            hold=opened.hold_now,
            deletes=opened.holds,
            is_patient=is_shared,
        )

    @asynccontextmanager
    async def live(
        self, opening: RootOpening, on_leaving: Callable[[BaseException | None], None] = _raise
    ) -> AsyncGenerator[TaskGroup]:
        """Open the root. Leaving tries the deletions that are due once.

        Args:
            opening: The way in which it is opened.
            on_leaving: Called with the failure of the body or None; see `own_tasks`.

        Yields:
            A task group that ends with it.
        """
        try:
            await self.load(opening)
            async with own_tasks(on_leaving) as tasks:
                tasks.start_soon(self.retention.deleter.run)
                tasks.start_soon(self.root.pins.tell, self.reading)
                yield tasks
                await self.retention.deleter.attempt(self._delete_s)
                tasks.cancel_scope.cancel()
        finally:
            self.retention.end()
            if self.root.announcements is not None:
                await self.root.announcements.leave()

            await self.root.give_back()

    async def load(self, opening: RootOpening | None = None) -> None:
        """List the steps in the root, which is opened first if an `opening` is given.

        In a job of several processes all of them call this.
        """
        self.catalogue.replace(await self.root.steps(opening, self.retention.deleter.waiting))
