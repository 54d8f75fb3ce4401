"""Who waits for memory, and for how long: noted where bytes are leased, read by the meter of the stage."""

from __future__ import annotations

__all__ = ("MemoryWaits", "waiting_for_memory", "with_waits")

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, final


@final
class MemoryWaits:
    """The time in which some task of one stretch of work waited for bytes. Used from one event loop.

    Tasks that wait at once count once.

    Args:
        clock: Seconds.
    """

    __slots__ = ("_clock", "_n_waiting", "_since", "_waited_s")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._n_waiting = 0
        self._since = 0.0
        self._waited_s = 0.0

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count the time of the block."""
        if not self._n_waiting:
            self._since = self._clock()

        self._n_waiting += 1
        try:
            yield
        finally:
            self._n_waiting -= 1
            if not self._n_waiting:
                self._waited_s += self._clock() - self._since

    @property
    def waited_s(self) -> float:
        """Seconds so far."""
        under_way = self._clock() - self._since if self._n_waiting else 0.0
        return self._waited_s + under_way


# Like the task itself, this belongs to whoever runs: tasks that a stage starts inherit it.
_CURRENT: Final[ContextVar[MemoryWaits | None]] = ContextVar("penstock_memory_waits", default=None)


@contextmanager
def with_waits(waits: MemoryWaits) -> Generator[None]:
    """Have what is waited for in the block, and in tasks started there, counted by `waits`."""
    token = _CURRENT.set(waits)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def waiting_for_memory() -> Generator[None]:
    """Count the block as waiting for memory, if anybody counts."""
    waits = _CURRENT.get()
    if waits is None:
        yield
        return

    with waits.waiting():
        yield
