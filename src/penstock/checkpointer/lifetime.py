"""A Checkpointer while it is open: its task group and threads, its background saves, its streams."""

from __future__ import annotations

__all__ = ("Lifetime",)

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar, final

from anyio import CancelScope
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from penstock.checkpointer.background_saves import BackgroundSaves
from penstock.checkpointer.engine import Engine
from penstock.checkpointer.process_exit import Stopping
from penstock.checkpointer.save_task import SaveTask
from penstock.checkpointer.streaming import Streams
from penstock.kernel.concurrency.entered_once import own_tasks
from penstock.kernel.concurrency.interpreter_settings import calm_interpreter
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import ClosedError
from penstock.kernel.memory.buffers import give_back_freed_memory
from penstock.kernel.memory.limit_watch import LimitSharing, watching_memory
from penstock.kernel.pipeline.futures import Milestone, SaveFuture
from penstock.kernel.pipeline.observers import watched
from penstock.kernel.protocols.coordinator import SingleProcessCoordinator
from penstock.kernel.storage.lease_renewal import renewing_leases

T = TypeVar("T")

TURNS: Final = 3
"""Turns of the loop in which a save comes to its first call in a worker thread."""

LONG_S: Final = 1.0
"""For how long one works with many leaves, or much data. A million leaves leave 500 MB with the allocator."""


@final
class Lifetime:
    """Everything that one open Checkpointer is running. Used from one event loop.

    Args:
        engine: Of the Checkpointer.
    """

    __slots__ = ("_engine", "_tasks", "_threads", "background", "stopping", "streams")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: TaskGroup | None = None
        self._threads: Threads | None = None
        self.background = BackgroundSaves()
        self.streams = Streams()
        self.stopping = Stopping(engine.config.stopping, self.background)

    @asynccontextmanager
    async def live(self) -> AsyncGenerator[None, None]:
        """Open it. Leaving waits for the saves under way; leaving on an error cancels them."""
        memory, events = self._engine.memory, self._engine.events
        coordinator, stores = self._engine.coordinator, self._engine.stores
        is_alone = isinstance(coordinator, SingleProcessCoordinator)
        sharing = LimitSharing(memory, None if is_alone else coordinator.count_neighbours, events)
        await sharing.look()
        try:
            async with own_tasks(self.background.raise_on_leaving) as tasks:
                self._tasks, self._threads = tasks, Threads()
                with (
                    self.stopping.watching(tasks),
                    watching_memory(tasks, memory, events),
                    sharing.going_on(tasks),
                    memory.counting(self._engine.caches()),
                    watched(self._engine.observers, memory.statistics, events),
                    renewing_leases(tasks, stores.leases, stores.shortest_lease_s),
                ):
                    yield
                    self.streams.stop()
                    await self.background.wait_ended()
        finally:
            self._tasks = None

    def running(self) -> tuple[TaskGroup, Threads]:
        """Return the task group and the threads.

        Raises:
            ClosedError: If the Checkpointer is not open.
            ForkedError: In a fork of the process that it was opened in.
        """
        self.stopping.check_process()
        if self._tasks is None or self._threads is None:
            raise ClosedError("the Checkpointer is not open; use it inside its `async with`")

        return self._tasks, self._threads

    def reading(self) -> Threads:
        """Return threads for what only reads: a cancellation leaves its calls, if the medium hangs.

        Raises:
            ClosedError, ForkedError: As `running`.
        """
        _, threads = self.running()
        return threads.leaving_calls(self._engine.config.stopping.read_s)

    async def calmly(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work()` with the interpreter settings that the configuration asks for.

        After long work a thread has the allocator return to the system what was freed.
        """
        tasks, threads = self.running()
        since = time.monotonic()
        with calm_interpreter(tasks, self._engine.config.loop):
            try:
                result = await work()
            finally:
                self._engine.memory.free_caches()  # which may have grown

        if time.monotonic() - since > LONG_S and self._tasks is tasks:
            tasks.start_soon(threads.run, give_back_freed_memory)

        return result

    async def start(self, task: SaveTask, until: Milestone) -> None:
        """Start a save in the background; return when it has passed `milestone`.

        Cancellation:
            Cancels the save and returns when its temporary files are gone. That it failed by itself just then
            is told to nobody; that a handler hangs or failed is told when the Checkpointer is left.
        """
        tasks, _ = self.running()
        self.background.add(task)
        tasks.start_soon(self.calmly, task)
        if self.stopping.dies_with_main_thread():
            tasks.start_soon(self._keep_alive, task.future)
        try:
            await task.future.wait(until)
        except BaseException:
            task.cancel()
            with CancelScope(shield=True):  # bounded by the task, which bounds its own clean-up
                await task.wait_ended()

            task.let_go()
            raise

    async def _keep_alive(self, save: SaveFuture) -> None:
        """Have the interpreter wait for a save, which begins first: starting a thread blocks."""
        for _ in range(TURNS):
            await checkpoint()

        self.stopping.keep_alive(save)

    async def wait(self) -> None:
        """Wait until no save is under way; raise the first unseen failure."""
        await self.background.wait_ended()
        self.background.raise_unseen()
