"""An account of bytes that may be held at once: leases, and the queue of waiters."""

from __future__ import annotations

__all__ = (
    "MEMORY_WAITS",
    "AccountStatistics",
    "ByteAccount",
    "ByteLease",
    "MemoryWaits",
    "Peak",
    "acquire_from_both",
    "releasing",
    "waiting_for_memory",
)

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final, TypeVar, final

from anyio import Event
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled

from penstock.kernel.errors import ConfigError, LeaseTooLargeError

PATIENCE: Final = 4
"""How many limits' worth of bytes prioritised requests may take ahead of a waiter before its turn comes."""


@dataclass(frozen=True, slots=True)
class AccountStatistics:
    """A snapshot of one account."""

    limit: int  #: bytes that may be leased at once
    leased: int  #: bytes held by live leases
    peak: int  #: the most that was ever leased at once
    tasks_waiting: int  #: tasks blocked in `acquire`
    waited_s: float  #: seconds that finished waits took, over all tasks


@final
@dataclass(eq=False, slots=True)
class Peak:
    """The most bytes that were leased at once in a stretch of time."""

    nbytes: int


@dataclass(eq=False, slots=True)
class _Room:
    limit: int
    leased: int = 0
    peak: int = 0
    waited_s: float = 0.0
    watched: list[Peak] = field(default_factory=list[Peak])  #: of stretches that go on


@dataclass(eq=False, slots=True)
class _Waiter:
    nbytes: int
    flow: str
    rooms: tuple[_Room, ...]  #: the flow's own account, if it has one, and the shared one
    turn: Event


@final
class ByteAccount:
    """Hand out leases on bytes.

    Prioritised requests go before the others, with a bound: once `PATIENCE` limits' worth of bytes have gone
    past a waiter, it is that waiter's turn. Among equals the flows (saves, restores) get equal bytes while
    both wait, and within a flow the order is FIFO.

    A flow may have its own limit within the shared one (`bound`). A request that waits for that limit
    blocks only its own flow.

    Use it from one event loop. Dropping a batch may call `release`, but never `acquire`.

    Args:
        limit: Bytes that may be leased at once; positive.
        name: The option that sets it, for errors.

    Raises:
        ConfigError: If `limit` is not positive.
    """

    __slots__ = ("_overtaken", "_prioritised", "_rooms", "_shared", "_waiting", "_whole")

    def __init__(self, limit: int, name: str = "memory.limit_bytes") -> None:
        if limit <= 0:
            raise ConfigError(name, f"must be positive, not {limit}")

        self._whole = _Room(limit)
        self._shared = (self._whole,)
        self._rooms: dict[str, tuple[_Room, ...]] = {}  # of a flow with a limit: its own, the shared one
        self._overtaken = 0
        self._prioritised = _WaitQueue()
        self._waiting = _WaitQueue()  # the waiters that are not prioritised

    @property
    def limit(self) -> int:
        """Bytes that may be leased at once."""
        return self._whole.limit

    @property
    def leased(self) -> int:
        """Bytes held by live leases."""
        return self._whole.leased

    @property
    def peak(self) -> int:
        """The most that was ever leased at once, bytes."""
        return self._whole.peak

    def limit_of(self, flow: str) -> int:
        """Bytes that one flow may lease at once."""
        return min(self._rooms.get(flow, self._shared)[0].limit, self._whole.limit)

    def resize(self, limit: int) -> None:
        """Change the limit. Leases that exist stay; if they exceed it, new ones wait until they do not."""
        assert limit > 0
        self._whole.limit = limit
        self._grant()

    def bound(self, flow: str, limit: int) -> None:
        """Give a flow its own limit, or change it. First called before the flow leases anything."""
        self._rooms.setdefault(flow, (_Room(limit), self._whole))[0].limit = limit
        self._grant()

    async def acquire(
        self, nbytes: int, *, prioritised: bool = False, admit_oversize: bool = False, flow: str = ""
    ) -> ByteLease:
        """Wait until `nbytes` are free and lease them.

        Args:
            nbytes: Bytes to lease; 0 is granted at once.
            prioritised: Wait before those that are not.
            admit_oversize: Let a request above the limit in once nothing else is leased, alone,
                instead of refusing it.
            flow: Whose bytes they are; flows that wait share evenly.

        Returns:
            A lease. Its holder releases it exactly when the bytes are freed.

        Raises:
            LeaseTooLargeError: If `nbytes` exceeds the limit and `admit_oversize` is not set.
            ValueError: If `nbytes` is negative.

        Cancellation:
            Always a checkpoint. A cancelled call leaves the account unchanged, even if the grant and a
            native `Task.cancel` arrive in the same tick.
        """
        _refuse_negative(nbytes)
        if not admit_oversize and nbytes > self.limit_of(flow):
            raise LeaseTooLargeError(nbytes, self.limit_of(flow))

        rooms = self._rooms.get(flow, self._shared)
        await checkpoint_if_cancelled()
        # First come, first served, also if this one would fit: large requests would starve otherwise.
        if nbytes and (self._waiting.flows or self._prioritised.flows or not _take(rooms, nbytes)):
            line = self._prioritised if prioritised else self._waiting
            await self._wait(_Waiter(nbytes, flow, rooms, Event()), line)
        else:
            try:
                await cancel_shielded_checkpoint()  # a loop of grants must not starve other tasks
            except BaseException:  # a native Task.cancel goes through every shield
                self._give_back(rooms, nbytes)
                raise

        return ByteLease(nbytes, partial(self._give_back, rooms))

    def acquire_nowait(self, nbytes: int, *, flow: str = "") -> ByteLease | None:
        """Lease `nbytes` if they are free and no request waits; else return None.

        A holder of bytes may ask for more in this way: it cannot wait for itself.
        """
        _refuse_negative(nbytes)
        rooms = self._rooms.get(flow, self._shared)
        if nbytes and (
            self._waiting.flows or self._prioritised.flows or not _take(rooms, nbytes, admit_alone=False)
        ):
            return None

        return ByteLease(nbytes, partial(self._give_back, rooms))

    @contextmanager
    def watching_peak(self) -> Generator[Peak]:
        """Watch how many bytes of the whole are leased at once, for the time of the block."""
        peak = Peak(self._whole.leased)
        self._whole.watched.append(peak)
        try:
            yield peak
        finally:
            self._whole.watched.remove(peak)

    def statistics(self, flow: str | None = None) -> AccountStatistics:
        """Return a snapshot of the whole, or of a flow that is bounded, for tests and for logs."""
        room = self._whole if flow is None else self._rooms[flow][0]
        lines = (self._prioritised.flows, self._waiting.flows)
        waiting = sum([len(flows[name]) for flows in lines for name in flows if flow in (None, name)])
        return AccountStatistics(room.limit, room.leased, room.peak, waiting, room.waited_s)

    async def _wait(self, waiter: _Waiter, line: _WaitQueue) -> None:
        line.append(waiter)
        since = time.perf_counter()
        # A prioritised newcomer may fit although the head of the other line does not.
        self._grant()
        try:
            with waiting_for_memory():
                await waiter.turn.wait()
        except BaseException:
            if waiter.turn.is_set():  # granted and cancelled in the same tick
                self._give_back(waiter.rooms, waiter.nbytes)
            else:
                line.remove(waiter)
                self._grant()

            raise
        finally:
            for room in waiter.rooms:
                room.waited_s += time.perf_counter() - since

    def _give_back(self, rooms: tuple[_Room, ...], nbytes: int) -> None:
        for room in rooms:
            room.leased -= nbytes
        if self._waiting.flows or self._prioritised.flows:
            self._grant()

    def _grant(self) -> None:
        while (found := self._next()) is not None and _take(found.rooms, found.nbytes):
            ahead = self._prioritised.serve(found)
            if not ahead:
                self._waiting.serve(found)

            self._overtaken = self._overtaken + found.nbytes if ahead and self._waiting.flows else 0
            found.turn.set()

    def _next(self) -> _Waiter | None:
        """Return the next request to grant: the first whose flow has room and that is first in its flow."""
        lines = (self._prioritised, self._waiting)
        if self._overtaken >= PATIENCE * self.limit:
            lines = (self._waiting, self._prioritised)

        full: set[str] = set()
        for line in lines:
            for waiter in line.heads():
                if waiter.flow in full:
                    continue

                room = waiter.rooms[0]
                # Of the shared room nothing that follows may go first, whether this one fits or not.
                if room is self._whole or not room.leased or room.leased + waiter.nbytes <= room.limit:
                    return waiter

                full.add(waiter.flow)

        return None


@final
class _WaitQueue:
    """The waiters: each flow in order of arrival; flows ordered by the bytes they got while others waited."""

    __slots__ = ("_served", "flows")

    def __init__(self) -> None:
        self.flows: dict[str, deque[_Waiter]] = {}  #: none of them empty; only changed here
        self._served: dict[str, int] = {}  # counted while anything waits

    def append(self, waiter: _Waiter) -> None:
        if waiter.flow not in self.flows:
            # A flow that was not waiting has no claim to what others got in that time.
            least = min([self._served[flow] for flow in self.flows], default=0)
            self._served[waiter.flow] = max(self._served.get(waiter.flow, 0), least)
            self.flows[waiter.flow] = deque()

        self.flows[waiter.flow].append(waiter)

    def heads(self) -> list[_Waiter]:
        """The first waiter of each flow; the flow that got the fewest bytes comes first."""
        return [self.flows[flow][0] for flow in sorted(self.flows, key=self._served.__getitem__)]

    def serve(self, waiter: _Waiter) -> bool:
        """Remove a head from this queue, if it is in it."""
        flow = self.flows.get(waiter.flow)
        if flow is None or flow[0] is not waiter:
            return False

        self._served[waiter.flow] += waiter.nbytes
        self.remove(waiter)
        return True

    def remove(self, waiter: _Waiter) -> None:
        flow = self.flows[waiter.flow]
        flow.remove(waiter)
        if not flow:
            del self.flows[waiter.flow]
        if not self.flows:
            self._served.clear()


@final
class ByteLease:
    """Bytes leased from one or two accounts. Travels with the piece that uses them."""

    __slots__ = ("_give_back", "_nbytes")

    def __init__(self, nbytes: int, *give_back: Callable[[int], None]) -> None:
        self._nbytes = nbytes
        self._give_back = give_back

    @property
    def nbytes(self) -> int:
        """Bytes this lease still holds."""
        return self._nbytes

    def split(self, nbytes: int) -> ByteLease:
        """Move `nbytes` of this lease into a new one, which is released separately."""
        _refuse_negative(nbytes)
        if nbytes > self._nbytes:
            raise LeaseTooLargeError(nbytes, self._nbytes)

        self._nbytes -= nbytes
        return ByteLease(nbytes, *self._give_back)

    def joined(self, other: ByteLease) -> ByteLease:
        """Merge this lease with one on as many bytes of another account; both are empty afterwards."""
        assert self._nbytes == other._nbytes
        nbytes, self._nbytes, other._nbytes = self._nbytes, 0, 0
        return ByteLease(nbytes, *self._give_back, *other._give_back)

    def release(self) -> None:
        """Give the bytes back. Never blocks, and may be called again."""
        if self._nbytes:
            nbytes, self._nbytes = self._nbytes, 0
            for give_back in self._give_back:
                give_back(nbytes)

    def __enter__(self) -> ByteLease:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.release()


async def acquire_from_both(
    inner: ByteAccount, outer: ByteAccount, nbytes: int, *, prioritised: bool = False, flow: str = ""
) -> ByteLease:
    """Lease the same bytes from two accounts, the inner (less shared) one first.

    A request that waits for the outer account holds bytes of the inner one, so the reverse order could
    deadlock. A request above a limit is admitted alone.

    Cancellation:
        As `ByteAccount.acquire`.
    """
    lease = await inner.acquire(nbytes, prioritised=prioritised, admit_oversize=True, flow=flow)
    try:
        other = await outer.acquire(nbytes, prioritised=prioritised, admit_oversize=True, flow=flow)
    except BaseException:
        lease.release()
        raise

    return lease.joined(other)


def _take(rooms: tuple[_Room, ...], nbytes: int, *, admit_alone: bool = True) -> bool:
    """Take bytes if all rooms have them; with `admit_alone` also where nothing else is leased."""
    for room in rooms:
        if room.leased + nbytes > room.limit and (room.leased or not admit_alone):
            return False

    for room in rooms:
        room.leased += nbytes
        room.peak = max(room.peak, room.leased)
        for peak in room.watched:
            peak.nbytes = max(peak.nbytes, room.leased)

    return True


def _refuse_negative(nbytes: int) -> None:
    if nbytes < 0:
        raise ValueError(f"cannot lease {nbytes} bytes: the number is negative")


@final
class MemoryWaits:
    """The time in which at least one task of a part of a run waited for bytes. Used from one event loop.

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


MEMORY_WAITS: Final[ContextVar[MemoryWaits | None]] = ContextVar("penstock_memory_waits", default=None)
"""Counts the waits of the running task, and of the tasks that it starts, which inherit it."""


@contextmanager
def waiting_for_memory() -> Generator[None]:
    """Count the block as waiting for memory, if anybody counts."""
    waits = MEMORY_WAITS.get()
    if waits is None:
        yield
        return

    with waits.waiting():
        yield


LeaseT = TypeVar("LeaseT", ByteLease, ByteLease | None)


@contextmanager
def releasing(lease: LeaseT) -> Generator[LeaseT]:
    """Release the lease if the block fails or is left; otherwise the block passes it on."""
    try:
        yield lease
    except BaseException:
        if lease is not None:
            lease.release()

        raise
