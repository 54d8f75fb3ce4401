"""The last stage of a streaming restore: hands over values one by one, at the caller's pace."""

from __future__ import annotations

__all__ = ("Deliver",)

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

from penstock.kernel.errors import IncompletePipelineError, SpecError
from penstock.kernel.messages.restore import Order, RestoredBatch, RestoredTree, RestorePlan
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.protocols.leaf import KeyPath
from penstock.stages.messages.batching import require_plan
from penstock.stages.reorder import ranks_of


@final
@dataclass(frozen=True, slots=True)
class Deliver:
    """Takes `RestoredBatch`es and hands over each value; yields an empty `RestoredTree` after the last.

    While no value is taken, no more is read ahead than `limit_bytes` allows in flight.

    Attributes:
        take: Called with the key path and the value of each leaf; returns when the caller has taken it.
        order: Values are handed over rank by rank, as `InOrder` has them read; None for each as soon as
            it is complete.
        check: Called when values have arrived, before any is handed over. Raises if they must not be.

    Raises:
        IncompletePipelineError: If a leaf did not arrive.
        PipelineError: If no batch brought the plan.
    """

    messages: ClassVar[Messages] = {RestoredBatch: RestoredTree}
    advice: ClassVar[Advice] = Advice(
        "Your loop takes the leaves slowly: hand the work on to a task, and take the next one.",
    )

    take: Callable[[KeyPath, Any], Awaitable[None]]
    order: Order | None = None
    check: Callable[[], Awaitable[None]] | None = None

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""
        yield _Deliverer(run, self)


@final
class _Deliverer:
    __slots__ = ("_early", "_given", "_left", "_plan", "_ranks", "_run", "_stage")

    def __init__(self, run: RestoreRun, stage: Deliver) -> None:
        self._run = run
        self._stage = stage
        self._plan: RestorePlan | None = None
        self._ranks: list[int] | None = None
        self._left: Counter[int] = Counter()  # values of each rank that were not delivered
        self._early: dict[int, list[tuple[int, object]]] = defaultdict(list)
        self._given: set[int] = set()

    async def __call__(self, batch: RestoredBatch, /) -> None:
        if self._stage.check is not None:
            await self._stage.check()

        plan = self._plan = require_plan(self._plan or batch.plan)
        if plan.computed:
            key_path = plan.infos[plan.computed[0].index].key_path
            raise SpecError(
                f"{key_path} is to be divided anew, and a stream gives what is stored; restore it"
            )

        if self._stage.order is None:
            for index, value in batch.values:
                await self._give(plan, index, value)

            return

        if self._ranks is None:
            self._ranks = await self._run.threads.run(ranks_of, self._stage.order, plan.infos)
            self._left = Counter(self._ranks)

        for index, value in batch.values:
            self._early[self._ranks[index]].append((index, value))

        del batch
        await self._give_ready(plan)

    async def _give_ready(self, plan: RestorePlan) -> None:
        """Hand over what has arrived in rank order, up to the first missing value."""
        while self._left:
            rank = min(self._left)
            ready = self._early.pop(rank, [])
            if not ready:
                return

            self._left[rank] -= len(ready)
            if not self._left[rank]:
                del self._left[rank]

            ready.reverse()
            while ready:
                await self._give(plan, *ready.pop())

    async def finish(self) -> AsyncIterator[RestoredTree]:
        plan = require_plan(self._plan)
        infos = plan.infos
        absent = [at for at in range(len(infos)) if at not in self._given]
        if absent:
            raise IncompletePipelineError(len(infos), len(self._given), infos[absent[0]].key_path)

        yield RestoredTree(None, plan)

    async def _give(self, plan: RestorePlan, index: int, value: object) -> None:
        self._given.add(index)
        await self._stage.take(plan.infos[index].keys, value)
