"""The memory regulator: the one budget of host bytes that all pipelines of a kernel share.

An `"auto"` limit is adjusted, while something runs, to the memory that is available.
"""

from __future__ import annotations

__all__ = (
    "Flow",
    "LimitSharing",
    "MemoryRegulator",
    "RegulatorStatistics",
    "watch_memory",
    "watching_memory",
)

import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, final

from anyio import CancelScope, move_on_after, sleep

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import ClosedError, ConfigError, CoordinationError, SpecError
from penstock.kernel.memory.bounded_cache import BoundedCache
from penstock.kernel.memory.byte_account import AccountStatistics, ByteAccount, ByteLease, Peak
from penstock.kernel.memory.memory_limit import (
    MemoryReading,
    MemorySource,
    SystemMemory,
    adjusted_limit,
    auto_limit,
    memory_domain,
)
from penstock.kernel.options import fit

if TYPE_CHECKING:
    from anyio.abc import TaskGroup
    from structlog.stdlib import BoundLogger

    from penstock.kernel.memory.memory_limit import MemorySource

Flow: TypeAlias = Literal["save", "restore"]
"""Which way bytes go."""

IN_FLIGHT_BYTES: Final = 128 * 2**20
"""Enough to keep a disk busy; more would only wait in its queue."""


@dataclass(frozen=True, slots=True)
class RegulatorStatistics:
    """A snapshot of a `MemoryRegulator`: of all host bytes together, and of each account."""

    limit: int  #: bytes that may be leased at once
    leased: int  #: bytes held by live leases
    peak: int  #: the most that was ever leased at once
    tasks_waiting: int  #: tasks blocked in `acquire`
    waited_s: float  #: seconds that finished waits took, over all tasks
    accounts: Mapping[str, AccountStatistics]
    """By the name of the option that limits it: `save_device_host_concurrent_bytes`,
    `save_concurrent_bytes`, `restore_concurrent_bytes`."""
    cached: int = 0  #: bytes that caches hold; with what is leased no more than the limit


@final
class MemoryRegulator:
    """The host bytes that saves and restores hold, and the bytes on their way to and from storage.

    Saves and restores, of one `Checkpointer` or of several that are given the same regulator, share
    the limit evenly while both wait. To be used from one event loop at a time.

    Args:
        limit: Host bytes that all of them together may hold: a number, a text such as `"2GiB"`, or
            `"auto"`: as the machine or the control group allows, adjusted while a `Checkpointer`
            that uses it is open.
        save_device_host_concurrent_bytes: Of these, how many saves may hold staged; by default all.
        save_concurrent_bytes: Bytes that may be on their way to storage at once.
        restore_concurrent_bytes: Bytes that may be on their way from storage at once.
        source: What `"auto"` looks at, instead of the system.

    Raises:
        ConfigError: If a limit is not positive, or no number of bytes.
    """

    __slots__ = (
        "_caches",
        "_entered",
        "_first",
        "_host",
        "_in_flight",
        "_staged_limit",
        "_thread",
        "_whole",
        "sharers",
        "source",
        "watcher",
    )

    def __init__(
        self,
        limit: int | str = "auto",
        *,
        save_device_host_concurrent_bytes: int | str | None = None,
        save_concurrent_bytes: int | str = IN_FLIGHT_BYTES,
        restore_concurrent_bytes: int | str = IN_FLIGHT_BYTES,
        source: MemorySource | None = None,
    ) -> None:
        if not (source is None or callable(getattr(source, "read", None))):
            raise SpecError(f"source has a method `read`, and is not {source!r}")

        read = SystemMemory() if source is None else source
        self.source: Final[MemorySource | None] = read if limit == "auto" else None  #: what the limit follows
        self._first: MemoryReading | None = None
        self.sharers = 1  #: how many processes have the memory that an `"auto"` limit is a part of
        whole = limit
        if self.source is not None:
            self._first = reading = self.source.read()
            whole = auto_limit(reading)
            limit = adjusted_limit(whole, whole, 0, reading)

        staged = save_device_host_concurrent_bytes
        self._staged_limit = (
            None if staged is None else _account("save_device_host_concurrent_bytes", staged).limit
        )
        self._host = _account("limit_bytes", limit)
        self._whole = _bytes("limit_bytes", whole)
        self._host.bound("save", self._host.limit if self._staged_limit is None else self._staged_limit)
        self._in_flight = {
            "save": _account("save_concurrent_bytes", save_concurrent_bytes),
            "restore": _account("restore_concurrent_bytes", restore_concurrent_bytes),
        }
        self.watcher: object | None = None  #: who adjusts the limit, if it is to be adjusted
        self._caches: list[BoundedCache[Any, Any]] = []  # once for each Checkpointer that uses it
        self._entered = 0
        self._thread = 0

    @property
    def limit(self) -> int:
        """Host bytes that may be leased at once, at present."""
        return self._host.limit

    def limit_of(self, flow: Flow) -> int:
        """Host bytes that saves, or that restores, may hold at once, at present."""
        return self._host.limit_of(flow)

    @property
    def peak(self) -> int:
        """The most host bytes that were ever leased at once."""
        return self._host.peak

    def watching_peak(self) -> AbstractContextManager[Peak]:
        """Watch how many host bytes are leased at once, for the time of the block."""
        return self._host.watching_peak()

    @property
    def whole(self) -> int:
        """The limit at the beginning, or this process's part of it; it never becomes more."""
        return self._whole

    def resize(self, limit: int) -> None:
        """Change the limit. Leases that exist stay; if they exceed it, new ones wait until they do not."""
        if self._staged_limit is None:
            self._host.bound("save", limit)

        self._host.resize(limit)

    def adjust(self, reading: MemoryReading) -> None:
        """Let an `"auto"` limit follow what the system says now."""
        part = reading.shared(self.sharers)
        limit = adjusted_limit(self._host.limit, self._whole, self._host.leased, part)
        if limit != self._host.limit:
            self.resize(limit)

    def share(self, sharers: int) -> None:
        """Take the part of one of so many processes. A limit that is a number stays as it is."""
        if self._first is None:
            return

        self.sharers, self._whole = sharers, auto_limit(self._first.shared(sharers))
        if self.limit > self._whole:
            self.resize(self._whole)

    def in_flight(self, flow: Flow) -> ByteAccount:
        """The account of bytes on their way to or from storage."""
        return self._in_flight[flow]

    async def acquire(
        self,
        nbytes: int,
        *,
        prioritised: bool = False,
        admit_oversize: bool = False,
        flow: Flow | None = None,
    ) -> ByteLease:
        """Wait until `nbytes` of host memory are free and lease them.

        Args:
            nbytes: Bytes to lease; 0 is granted at once.
            prioritised: Wait before those that are not.
            admit_oversize: Let a request above the limit in once nothing else is leased, alone,
                instead of refusing it.
            flow: Who asks; what saves hold counts as staged, too.

        Returns:
            A lease. Its holder releases it, exactly where the bytes die.

        Raises:
            LeaseTooLargeError: If `nbytes` exceeds the limit and `admit_oversize` is not set.
            ValueError: If `nbytes` is negative.

        Cancellation:
            As `ByteAccount.acquire`.
        """
        self.free_caches(nbytes)
        return await self._host.acquire(
            nbytes, prioritised=prioritised, admit_oversize=admit_oversize, flow=flow or ""
        )

    def acquire_nowait(self, nbytes: int, *, flow: Flow | None = None) -> ByteLease | None:
        """Lease `nbytes` of host memory if they are free and no request waits; else return None.

        Caches give way to what is leased, as they do to `acquire`.
        """
        lease = self._host.acquire_nowait(nbytes, flow=flow or "")
        if lease is not None:
            self.free_caches()

        return lease

    def free_caches(self, nbytes: int = 0) -> None:
        """Empty caches, as far as they and what is leased, and `nbytes` more, exceed the limit.

        Caches give way at once, so no request waits for them.
        """
        caches = dict.fromkeys(self._caches)  # each once, in the order in which they came
        excess = self._host.leased + nbytes + sum([cache.nbytes for cache in caches]) - self._host.limit
        for cache in caches:
            if excess > 0:
                excess -= cache.free(excess)

    @contextmanager
    def counting(self, caches: Sequence[BoundedCache[Any, Any]]) -> Generator[None]:
        """Count what these caches hold, and empty them where it is needed, for the time of the block."""
        self._caches += caches
        try:
            yield
        finally:
            for cache in caches:
                self._caches.remove(cache)

    def statistics(self) -> RegulatorStatistics:
        """Return a snapshot, for tests and for logs."""
        host = self._host.statistics()
        return RegulatorStatistics(
            host.limit,
            host.leased,
            host.peak,
            host.tasks_waiting,
            host.waited_s,
            {
                "save_device_host_concurrent_bytes": self._host.statistics("save"),
                "save_concurrent_bytes": self._in_flight["save"].statistics(),
                "restore_concurrent_bytes": self._in_flight["restore"].statistics(),
            },
            sum([cache.nbytes for cache in dict.fromkeys(self._caches)]),
        )

    @contextmanager
    def used(self) -> Generator[None]:
        """Say that the event loop of this thread uses it.

        Raises:
            ClosedError: If another one does: waiting there would not be woken by a release here.
        """
        here = threading.get_ident()
        if self._entered and self._thread != here:
            raise ClosedError("the MemoryRegulator is in use by the event loop of another thread")

        self._thread = here
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1


def _account(name: str, limit: int | str) -> ByteAccount:
    return ByteAccount(_bytes(name, limit), f"memory.{name}")


def _bytes(name: str, value: int | str) -> int:
    try:
        return cast("int", fit(value, int, "limit_bytes", positive=True))
    except ValueError as error:
        raise ConfigError(f"memory.{name}", str(error)) from None


# The pressure is the kernel's average of ten seconds: looking more often shows little more.
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
    watch = partial(watch_memory, memory, events, interval_s=interval_s, scope=scope)
    with memory.used():
        if memory.source is not None:
            tasks.start_soon(watch, name="penstock memory watch")
        try:
            yield
        finally:
            scope.cancel()


async def watch_memory(
    memory: MemoryRegulator,
    events: BoundLogger,
    *,
    interval_s: float = INTERVAL_S,
    scope: CancelScope | None = None,
) -> None:
    """Check the system's memory periodically and adjust the limit. Each change is logged as an event.

    If several tasks watch one regulator, one of them does the work; when it ends, another takes over.
    Returns at once if the limit is a number, and when `scope` is cancelled.

    Cancellation:
        Ends it once the current reading is done.
    """
    source = memory.source
    if source is None:
        return

    threads = Threads(1)  # threads of its own: the pipelines' are busy exactly when memory is short
    me = object()
    with scope or CancelScope():
        try:
            while True:
                await sleep(interval_s)
                if memory.watcher is None:
                    memory.watcher = me
                if memory.watcher is not me:
                    continue

                try:
                    reading = await threads.run(source.read)
                except Exception as error:  # an unchanged limit is better than a failed save
                    events.warning("memory.unreadable", error=repr(error))
                    continue

                before = memory.limit
                memory.adjust(reading)
                if memory.limit != before:
                    events.info(
                        "memory.limit_lowered" if memory.limit < before else "memory.limit_raised",
                        limit_bytes=memory.limit,
                        before_bytes=before,
                        free_bytes=reading.free,
                        pressure_percent=reading.pressure,
                    )
        finally:
            if memory.watcher is me:
                memory.watcher = None


Count: TypeAlias = Callable[[str], Awaitable[tuple[int, bool]]]
"""Says where this process gets its memory; returns how many get it there, and whether all have said where."""

# Processes of a job start within seconds of each other, or much later: the interval doubles from the one to
# the other.
SHORTEST_S: Final = 1.0
LONGEST_S: Final = 60.0
# A service that does not answer may not hold up the start.
ANSWER_S: Final = 10.0


@final
class LimitSharing:
    """Counts the processes with which this one shares its host, until all of the job have come.

    Processes that have not opened a Checkpointer do not count.

    Args:
        memory: What is shared. Nothing is done if its limit is a number.
        count: How they are counted; None if there is one process.
        events: Called with each change.
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
