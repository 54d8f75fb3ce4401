"""Adjusts an `"auto"` limit to the memory that is available."""

from __future__ import annotations

__all__ = ("LimitSharing", "watch_memory", "watching_memory")

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias, final

import anyio
from anyio import CancelScope, move_on_after, sleep

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import CoordinationError
from penstock.kernel.memory.memory_limit import adjusted_limit, memory_domain

if TYPE_CHECKING:
    from anyio.abc import TaskGroup
    from structlog.stdlib import BoundLogger

    from penstock.kernel.memory.memory_limit import MemorySource
    from penstock.kernel.memory.regulator import MemoryRegulator


INTERVAL_S: Final = 1.0


@contextmanager
def watching_memory(
    tasks: TaskGroup, memory: MemoryRegulator, events: BoundLogger, *, interval_s: float = INTERVAL_S
) -> Generator[None]:
    """Use `memory` in this event loop and, if its limit is `"auto"`, have a task of `tasks` adjust it.

    Raises:
        ClosedError: If the event loop of another thread uses it.
    """
    scope = CancelScope()

    async def watch() -> None:
        with scope:
            await watch_memory(memory, events, interval_s=interval_s)

    with memory.used():
        if memory.source is not None:
            tasks.start_soon(watch, name="penstock memory watch")
        try:
            yield
        finally:
            scope.cancel()


async def watch_memory(
    memory: MemoryRegulator, events: BoundLogger, *, interval_s: float = INTERVAL_S
) -> None:
    """Check the system's memory periodically and adjust the limit. Each change is logged as an event.

    If several tasks watch one regulator, one of them does the work; when it ends, another takes over.
    Returns at once if the limit is a number.

    Cancellation:
        Ends it once the current reading is done.
    """
    source = memory.source
    if source is None:
        return

    threads = Threads(1)  # threads of its own: the pipelines' are busy exactly when memory is short
    me = object()
    try:
        while True:
            await anyio.sleep(interval_s)
            if memory.watcher is None:
                memory.watcher = me
            if memory.watcher is me:
                await _look(memory, source, threads, events)
    finally:
        if memory.watcher is me:
            memory.watcher = None


async def _look(memory: MemoryRegulator, source: MemorySource, threads: Threads, events: BoundLogger) -> None:
    try:
        reading = await threads.run(source.read)
    except Exception as error:  # an unchanged limit is better than a failed save
        events.warning("memory.unreadable", error=repr(error))
        return

    before, leased = memory.limit, memory.statistics().leased
    limit = adjusted_limit(before, memory.whole, leased, reading.shared(memory.sharers))
    if limit != before:
        memory.resize(limit)
        events.info(
            "memory.limit_lowered" if limit < before else "memory.limit_raised",
            limit_bytes=limit,
            before_bytes=before,
            free_bytes=reading.free,
            pressure_percent=reading.pressure,
        )


Count: TypeAlias = Callable[[str], Awaitable[tuple[int, bool]]]
"""Says where this process gets its memory; returns how many get it there, and whether all have said where."""

SHORTEST_S: Final = 1.0
LONGEST_S: Final = 60.0
ANSWER_S: Final = 10.0


@final
class LimitSharing:
    """Counts the processes with which this one shares its host, until all of the job have come.

    Processes that have not opened a Checkpointer do not count.

    Args:
        memory: What is shared. Nothing is done if its limit is a number.
        count: How they are counted; None if there is one process.
        events: Told of each change.
        domain: What tells the host, or the control group that bounds them together. Blocking.
    """

    __slots__ = ("_count", "_domain", "_events", "_memory")

    def __init__(
        self,
        memory: MemoryRegulator,
        count: Count | None,
        events: BoundLogger,
        *,
        domain: Callable[[], str] = memory_domain,
    ) -> None:
        self._memory = memory
        self._count = None if memory.source is None else count
        self._events = events
        self._domain = domain

    async def look(self) -> bool:
        """Count once, and take one part of so many. Returns whether the number is final. Never raises.

        Cancellation:
            As that of `count`.
        """
        if self._count is None:
            return True

        found, is_final = self._memory.sharers, False
        try:
            with move_on_after(ANSWER_S):
                found, is_final = await self._count(await Threads(1).run(self._domain))
        except CoordinationError as error:  # an unchanged limit is better than a failed save
            self._events.warning("memory.unshared", error=repr(error))

        if found != self._memory.sharers:
            self._memory.share(found)
            self._events.info("memory.limit_shared", processes=found, limit_bytes=self._memory.limit)

        return is_final

    @contextmanager
    def going_on(self, tasks: TaskGroup, *, interval_s: float = SHORTEST_S) -> Generator[None]:
        """Look again and again while the body runs, ever more rarely, until the number is final."""
        scope = CancelScope()

        async def look_again() -> None:
            wait_s = interval_s
            with scope:
                while not await self.look():
                    await sleep(wait_s)
                    wait_s = min(2 * wait_s, LONGEST_S)

        if self._count is not None:
            tasks.start_soon(look_again, name="penstock memory sharing")
        try:
            yield
        finally:
            scope.cancel()
