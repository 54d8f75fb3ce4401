"""Opens a checkpoint in one process of a job, and in the others with what that one was answered."""

from __future__ import annotations

__all__ = ("LocateOnce",)

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

from penstock.kernel.messages.restore import Located, RestoreRequest
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.stages.locate import Locate


@final
@dataclass(frozen=True, slots=True)
class LocateOnce:
    """Does what `locate` does, in all processes of a job at one time.

    Attributes:
        share: Gives every process the bytes that process 0 has. Called once.
        record: Returns a store that keeps its answers.
        answered: Returns a store that has them.
        inner: What opens.
    """

    messages: ClassVar[Messages] = {RestoreRequest: Located}

    share: Callable[[bytes | None], Awaitable[bytes]]
    record: Callable[[Any], Any]
    answered: Callable[[Any, bytes], Any]
    inner: Locate = field(default_factory=Locate)

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""

        async def locate(request: RestoreRequest, /) -> Located:
            if run.coordinator.is_primary:
                recorder = self.record(run.store)
                located = await _located(self.inner, replace(run, store=recorder), request)
                await self.share(await run.threads.run(recorder.told))
                return located

            told = await self.share(None)
            answered = await run.threads.run(self.answered, run.store, told)
            del told
            try:
                return await _located(self.inner, replace(run, store=answered), request)
            finally:
                answered.forget()

        yield locate


async def _located(locate: Locate, run: RestoreRun, request: RestoreRequest) -> Located:
    async with locate.open(run) as actor:
        found: Any = actor
        located: Located = await found(request)
        return located
