"""A job of several processes, as one of them sees it: what it asks of the service, and what it remembers."""

from __future__ import annotations

__all__ = ("Job",)

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

from anyio import sleep

from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.coordination.key_value_calls import KeyValueCalls, move_on_after_awake
from penstock.kernel.coordination.procedures import Call, Member, Memory, Procedure

T = TypeVar("T")


@final
@dataclass(slots=True, eq=False)
class _Kept:
    """The memory of operations, for all event loops of the process."""

    memory: Memory = field(default_factory=Memory)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def change(self, change: Callable[[Memory], Memory]) -> Memory:
        """Replace it; return what it was before."""
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

    def elsewhere(self) -> Job:
        """Return the same for the event loop that runs here."""
        return replace(self, calls=self.calls.elsewhere())

    @property
    def limits(self) -> JobLimits:
        """The times that the processes wait for each other."""
        return self.member.limits

    def within(self, limit_s: float, *, shield: bool = False) -> AbstractAsyncContextManager[None]:
        """Move on after so many seconds in which this process did not stand still."""
        return move_on_after_awake(limit_s, self.limits.beat_s, shield=shield)

    async def perform(self, procedure: Procedure[T], local: Callable[[Call], Any] | None = None) -> T:
        """Make the calls of a procedure, one after another, and return what came of it.

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
