"""A job of several processes, as one of them sees it: what it asks of the service, and what it remembers."""

from __future__ import annotations

__all__ = (
    "Job",
    "KeyValueCalls",
    "move_on_after_awake",
)

import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, final

from anyio import CancelScope, create_task_group, current_time, get_cancelled_exc_class, sleep

from penstock.handlers.coordinators.job_options import JobLimits
from penstock.handlers.coordinators.procedures import Call, Member, Memory, Procedure
from penstock.handlers.coordinators.silence import AwakeLimit
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.protocols.coordinator import KeyValues

T = TypeVar("T")

LONGEST_WAIT_S = 10.0
"""Of one call. A process cannot exit before the threads that it has left behind are back."""

DEFAULT_BEAT_S: Final = 1.0

MOST_WAITS = 64
"""Threads of their own: a wait for another process must not keep a save's writes from running."""


@final
class KeyValueCalls:
    """The calls of `KeyValues`, each in a worker thread that a cancellation abandons.

    What was left still takes effect, so callers shield what must be known to have happened.

    Args:
        service: The same for all processes.
        beat_s: How often a long wait looks whether this process stood still.
    """

    __slots__ = ("_beat_s", "_service", "_threads", "counted")

    def __init__(self, service: KeyValues, beat_s: float = DEFAULT_BEAT_S) -> None:
        self._service = service
        self._beat_s = beat_s
        self._threads = Threads(MOST_WAITS).leaving_calls(0.0)
        self.counted: Counter[str] = Counter()  #: how often each call was made

    def in_this_loop(self) -> KeyValueCalls:
        """Return calls of the same service for the event loop that runs here."""
        return KeyValueCalls(self._service, self._beat_s)

    async def put(self, key: str, value: bytes, *, replace: bool = False) -> bool:
        """See `KeyValues.put`."""
        return await self._run(self._service.put, key, value, replace)

    async def put_to_its_end(self, key: str, value: bytes, left_s: float) -> None:
        """Replace a value. A cancellation waits for the answer, but no longer than `left_s`.

        So what is deleted next does not come back, unless the service is slow.
        """
        self.counted["put"] += 1
        await self._threads.leaving_calls(left_s).run(self._service.put, key, value, True)

    async def put_once(self, key: str, own: bytes) -> bool:
        """Set a key that no other process sets; return whether it has that value.

        It may be called again: what was not confirmed in time may have been heard nevertheless.
        """
        return await self.put(key, own) or await self.wait(key, 0.0) == own

    async def wait(self, key: str, timeout_s: float) -> bytes | None:
        """See `KeyValues.wait`. Made of several calls if it is long, or if this process stood still."""
        if timeout_s <= self._beat_s:
            return await self._run(self._service.wait, key, max(timeout_s, 0.0))

        found: bytes | None = None
        async with _watched(AwakeLimit.begin(timeout_s, self._beat_s, current_time())) as watch:
            while True:
                n_anew, left_s = watch.limit.n_anew, watch.limit.left_s(current_time())
                found = await self._run(self._service.wait, key, min(left_s, LONGEST_WAIT_S))
                watch.look()
                if found is not None or (left_s <= LONGEST_WAIT_S and watch.limit.n_anew == n_anew):
                    break

        return found

    async def under(self, prefix: str) -> Mapping[str, bytes]:
        """See `KeyValues.under`."""
        return await self._run(self._service.under, prefix)

    async def by_process(self, prefix: str) -> dict[int, bytes]:
        """Return what the processes said under a prefix, by their index, ascending.

        Made ready in the worker thread: of 10,000 processes that takes some milliseconds.
        """
        return await self._run(self._by_process, prefix)

    async def count(self, key: str) -> int:
        """See `KeyValues.count`."""
        return await self._run(self._service.count, key)

    async def delete(self, prefix: str) -> None:
        """See `KeyValues.delete`."""
        await self._run(self._service.delete, prefix)

    def _by_process(self, prefix: str) -> dict[int, bytes]:
        found = self._service.under(prefix)
        return dict(sorted([(int(index), value) for index, value in found.items()]))

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        self.counted[function.__name__] += 1
        return await self._threads.run(function, *args)


@final
class _Watch:
    """A limit that a task looks at once a beat."""

    __slots__ = ("limit",)

    def __init__(self, limit: AwakeLimit) -> None:
        self.limit = limit

    def look(self) -> float:
        """Look at it; return how much is left."""
        now = current_time()
        self.limit = self.limit.look(now)
        return self.limit.left_s(now)

    async def run_out(self) -> None:
        """Look again and again; return once it is over."""
        while True:
            left_s = self.look()
            if left_s <= 0:
                return

            await sleep(min(left_s, self.limit.beat_s))

    async def end(self, scope: CancelScope) -> None:
        """Cancel `scope` once the limit is over."""
        await self.run_out()
        scope.cancel()


@asynccontextmanager
async def _watched(limit: AwakeLimit, *, cancels: bool = False) -> AsyncGenerator[_Watch]:
    """Look at a limit as long as the body runs; cancel that once it is over, if asked to."""
    watch, failure = _Watch(limit), None
    async with create_task_group() as tasks:
        if cancels:
            tasks.start_soon(watch.end, tasks.cancel_scope)
        else:
            tasks.start_soon(watch.run_out)

        try:
            yield watch
        except get_cancelled_exc_class():
            raise
        except BaseException as error:
            failure = error

        tasks.cancel_scope.cancel()

    if failure is not None:  # raised here, so that it is in no exception group
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame


@asynccontextmanager
async def move_on_after_awake(limit_s: float, beat_s: float, *, shield: bool = False) -> AsyncGenerator[None]:
    """Do what anyio's `move_on_after` does, but for time in which this process stood still.

    Args:
        limit_s: Seconds.
        beat_s: How often it is looked whether this process stood still.
        shield: Whether a cancellation from outside waits until then.
    """
    with CancelScope(shield=shield):
        async with _watched(AwakeLimit.begin(limit_s, beat_s, current_time()), cancels=True):
            yield


@final
@dataclass(slots=True, eq=False)
class _Kept:
    """The memory of operations, for all event loops of the process."""

    memory: Memory = field(default_factory=Memory)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def change(self, change: Callable[[Memory], Memory]) -> Memory:
        """Replace the value; return the earlier one."""
        with self.lock:
            before = self.memory
            self.memory = change(before)
            return before


@final
@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """The state that all operations of one process share."""

    calls: KeyValueCalls
    member: Member
    kept: _Kept = field(default_factory=_Kept)

    def in_this_loop(self) -> Job:
        """Return the same for the event loop that runs here."""
        return replace(self, calls=self.calls.in_this_loop())

    @property
    def limits(self) -> JobLimits:
        """The times that the processes wait for each other."""
        return self.member.limits

    def within(self, limit_s: float, *, shield: bool = False) -> AbstractAsyncContextManager[None]:
        """Move on after so many seconds in which this process did not stand still."""
        return move_on_after_awake(limit_s, self.limits.beat_s, shield=shield)

    async def perform(self, procedure: Procedure[T], local: Callable[[Call], Any] | None = None) -> T:
        """Make the calls of a procedure, one after another, and return its result.

        Args:
            procedure: Not begun yet.
            local: Takes what the procedure enters and learns.
        """
        answer: Any = None
        while True:
            try:
                call = procedure.send(answer)
            except StopIteration as end:
                found: T = end.value
                return found

            answer = await self._made(call, local)

    async def _made(self, call: Call, local: Callable[[Call], Any] | None) -> Any:
        calls = self.calls
        match call.kind:
            case "put":
                return await calls.put(call.key, call.value, replace=call.replace)
            case "wait":
                return await calls.wait(call.key, call.limit_s)
            case "under":
                return await calls.under(call.key)
            case "by_process":
                return await calls.by_process(call.key)
            case "count":
                return await calls.count(call.key)
            case "delete":
                return await calls.delete(call.key)
            case "sleep":
                return await sleep(call.limit_s)
            case "change":
                return self.kept.change(call.value)
            case "enter" | "learn":
                return None if local is None else local(call)

    @asynccontextmanager
    async def seeking(self, path: str) -> AsyncGenerator[None]:
        """Remember for as long as the body runs that this process looks for an operation on `path`."""

        def without(memory: Memory) -> Memory:
            at = memory.sought.index(path)
            return replace(memory, sought=memory.sought[:at] + memory.sought[at + 1 :])

        self.kept.change(lambda memory: replace(memory, sought=(*memory.sought, path)))
        try:
            yield
        finally:
            self.kept.change(without)
