"""Adjusts an `"auto"` limit to the memory that is available."""

from __future__ import annotations

__all__ = (
    "watch_memory",
    "watching_memory",
)

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import anyio
from anyio import CancelScope

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.memory.memory_limit import adjusted_limit

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
