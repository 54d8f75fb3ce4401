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
from penstock.kernel.protocols.stores import Directories
from penstock.steps.catalogue import Catalogue, StepFiles
from penstock.steps.opened_root import OpenedRoot, RootOptions
from penstock.steps.retention import Retention

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
        options: The way in which it is used.

    Raises:
        UnsupportedByStoreError: If the store cannot move steps to `trash`.
    """

    def __init__(self, engine: Engine, root: str, files: StepFiles, options: RootOptions) -> None:
        if options.trash is not None and engine.store.directories is None:
            raise UnsupportedByStoreError("move deleted steps in", root, engine.store, Directories)

        stopping = engine.config.stopping
        self._delete_s = stopping.delete_s
        self.store, self.events = engine.store, engine.events
        self.threads = Threads(BUSY_THREADS)
        self.reading = self.threads.leaving_calls(stopping.read_s)  #: for what only reads
        self.root = OpenedRoot(engine, root, files, self.threads, self.reading, options)
        """The directory, and the right to write there."""
        opened = self.root
        self.catalogue = Catalogue(engine.store, root, files, engine.events, by_number=options.by_number)
        """Which steps there are."""
        self.retention = Retention(self.catalogue, opened, engine, root, self.reading, options)
        """Which of them go."""

    @asynccontextmanager
    async def live(
        self, on_leaving: Callable[[BaseException | None], None] = _raise
    ) -> AsyncGenerator[TaskGroup]:
        """Open the root. Leaving tries each due deletion once.

        Args:
            on_leaving: Called with the failure of the body or None; see `own_tasks`.

        Yields:
            A task group that ends with it.
        """
        try:
            await self.load(opens=True)
            async with own_tasks(on_leaving) as tasks:
                tasks.start_soon(self.retention.deleter.run)
                tasks.start_soon(self.root.pins.tell, self.reading)
                yield tasks
                await self.retention.deleter.attempt(self._delete_s)
                tasks.cancel_scope.cancel()
        finally:
            self.retention.end()
            if (announcements := self.root.job.announcements) is not None:
                await announcements.leave()

            await self.root.give_back()

    async def load(self, *, opens: bool = False) -> None:
        """List the steps in the root, which is opened first if that is asked for.

        In a job of several processes all of them call this.
        """
        self.catalogue.replace(await self.root.steps(self.retention.deleter.waiting, opens=opens))
