"""How long an event loop stands still."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import final

import anyio

BEAT_S = 0.001
FLOOR_S = 1.0


@final
class Heartbeat:
    """A task that wants to run every millisecond, and remembers the longest it had to wait."""

    def __init__(self) -> None:
        self._worst = 0.0
        self._last = time.perf_counter()

    def reset(self) -> None:
        self._worst, self._last = 0.0, time.perf_counter()

    def worst_s(self) -> float:
        """The longest delay since the reset, one that has not ended yet included."""
        return max(self._worst, time.perf_counter() - self._last - BEAT_S, 0.0)

    async def beat(self) -> None:
        while True:
            await anyio.sleep(BEAT_S)
            now = time.perf_counter()
            self._worst, self._last = max(self._worst, now - self._last - BEAT_S), now


@asynccontextmanager
async def beating() -> AsyncGenerator[Heartbeat]:
    """A heartbeat in this event loop."""
    heartbeat = Heartbeat()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heartbeat.beat)
        yield heartbeat
        tasks.cancel_scope.cancel()


async def noise_floor(heartbeat: Heartbeat) -> float:
    """The longest delay while nothing else is done here."""
    heartbeat.reset()
    await anyio.sleep(FLOOR_S)
    return heartbeat.worst_s()
