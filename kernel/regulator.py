"""The memory regulator: a FIFO budget of host bytes, shared by every pipeline of a kernel."""

from __future__ import annotations

__all__ = ("ByteLease", "MemoryRegulator", "RegulatorStatistics")

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import final

from anyio import Event
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled

from penstock.kernel.errors import ConfigError, LeaseTooLargeError


@dataclass(frozen=True, slots=True)
class RegulatorStatistics:
    """A snapshot of a `MemoryRegulator`."""

    limit: int  #: bytes that may be leased at once
    leased: int  #: bytes held by live leases
    peak: int  #: the most that was ever leased at once
    tasks_waiting: int  #: tasks blocked in `acquire`
    waited_s: float  #: seconds that finished waits took, over all tasks


@dataclass(eq=False, slots=True)
class _Waiter:
    nbytes: int
    turn: Event


@final
class MemoryRegulator:
    """Hand out leases on host bytes, first come, first served.

    The prioritised wait before the others; within each kind nobody overtakes. To be used from one
    event loop; `release` only, never `acquire`, may be reached through a batch that is dropped.

    Args:
        limit: Bytes that may be leased at once; positive.

    Raises:
        ConfigError: If `limit` is not positive.
    """

    __slots__ = ("_leased", "_limit", "_peak", "_prioritised", "_waited_s", "_waiting")

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ConfigError("memory.limit_bytes", f"must be positive, not {limit}")

        self._limit = limit
        self._leased = 0
        self._peak = 0
        self._waited_s = 0.0
        self._prioritised: deque[_Waiter] = deque()
        self._waiting: deque[_Waiter] = deque()

    @property
    def limit(self) -> int:
        """Bytes that may be leased at once."""
        return self._limit

    async def acquire(
        self, nbytes: int, *, prioritised: bool = False, admit_oversize: bool = False
    ) -> ByteLease:
        """Wait until `nbytes` are free and lease them.

        Args:
            nbytes: Bytes to lease; 0 is granted at once.
            prioritised: Wait before those that are not.
            admit_oversize: Let a request above the limit in once nothing else is leased, alone,
                instead of refusing it.

        Returns:
            A lease. Whoever holds it releases it, exactly where the bytes die.

        Raises:
            LeaseTooLargeError: If `nbytes` exceeds the limit and `admit_oversize` is not set.
            ValueError: If `nbytes` is negative.

        Cancellation:
            Always a checkpoint. A cancelled call leaves the regulator as it found it, also when
            the grant and a native `Task.cancel` meet in one tick.
        """
        _refuse_negative(nbytes)
        if nbytes > self._limit and not admit_oversize:
            raise LeaseTooLargeError(nbytes, self._limit)

        await checkpoint_if_cancelled()
        if nbytes and (self._waiting or self._prioritised or not self._fits(nbytes)):
            await self._wait(_Waiter(nbytes, Event()), self._prioritised if prioritised else self._waiting)
        else:
            self._take(nbytes)
            await self._checkpoint(nbytes)

        return ByteLease(nbytes, self._give_back)

    def statistics(self) -> RegulatorStatistics:
        """Return a snapshot, for tests and for logs."""
        waiting = len(self._waiting) + len(self._prioritised)
        return RegulatorStatistics(self._limit, self._leased, self._peak, waiting, self._waited_s)

    async def _wait(self, waiter: _Waiter, queue: deque[_Waiter]) -> None:
        queue.append(waiter)
        since = time.perf_counter()
        # A prioritised newcomer may fit although the head of the other queue does not.
        self._grant()
        try:
            await waiter.turn.wait()
        except BaseException:
            if waiter.turn.is_set():  # granted and cancelled in the same tick
                self._give_back(waiter.nbytes)
            else:
                queue.remove(waiter)
                self._grant()

            raise
        finally:
            self._waited_s += time.perf_counter() - since

    async def _checkpoint(self, nbytes: int) -> None:
        """Let others run, so that a loop of grants cannot starve them."""
        try:
            await cancel_shielded_checkpoint()
        except BaseException:  # a native Task.cancel goes through every shield
            self._give_back(nbytes)
            raise

    def _fits(self, nbytes: int) -> bool:
        return self._leased + nbytes <= self._limit or self._leased == 0

    def _take(self, nbytes: int) -> None:
        self._leased += nbytes
        self._peak = max(self._peak, self._leased)

    def _give_back(self, nbytes: int) -> None:
        self._leased -= nbytes
        self._grant()

    def _grant(self) -> None:
        for queue in (self._prioritised, self._waiting):
            while queue:
                if not self._fits(queue[0].nbytes):
                    return

                waiter = queue.popleft()
                self._take(waiter.nbytes)
                waiter.turn.set()


@final
class ByteLease:
    """Bytes on loan from a `MemoryRegulator`; travels with the piece that needs them."""

    __slots__ = ("_give_back", "_nbytes")

    def __init__(self, nbytes: int, give_back: Callable[[int], None]) -> None:
        self._nbytes = nbytes
        self._give_back = give_back

    @property
    def nbytes(self) -> int:
        """Bytes still on loan through this lease."""
        return self._nbytes

    def split(self, nbytes: int) -> ByteLease:
        """Move `nbytes` of this lease into a new one, to be released apart from it."""
        _refuse_negative(nbytes)
        if nbytes > self._nbytes:
            raise LeaseTooLargeError(nbytes, self._nbytes)

        self._nbytes -= nbytes
        return ByteLease(nbytes, self._give_back)

    def release(self) -> None:
        """Give the bytes back. Never blocks, and may be called again."""
        if self._nbytes:
            nbytes, self._nbytes = self._nbytes, 0
            self._give_back(nbytes)

    def __enter__(self) -> ByteLease:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.release()


def _refuse_negative(nbytes: int) -> None:
    if nbytes < 0:
        raise ValueError(f"a lease cannot be of {nbytes} bytes: it is negative")
