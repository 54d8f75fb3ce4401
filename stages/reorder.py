"""Puts all leaves of a restore into the order that the caller chose."""

from __future__ import annotations

__all__ = ("InOrder", "ranks_of")

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from penstock.kernel.errors import HandlerFailedError
from penstock.kernel.messages.restore import Order, PlannedBatch, RestorePlan
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.leaf import ParamInfo
from penstock.kernel.protocols.leaf_handlers import ReadLeaves
from penstock.stages.planning.key_patterns import pattern_fits


@final
@dataclass(frozen=True, slots=True)
class InOrder:
    """Holds back every leaf until it has seen the last one, and passes them on rank by rank.

    Attributes:
        order: As for `ranks_of`.
    """

    messages: ClassVar[Messages] = {PlannedBatch: PlannedBatch}

    order: Order

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""
        yield _Sorter(self.order, run)


def ranks_of(order: Order, infos: Sequence[ParamInfo]) -> list[int]:
    """Return the rank of each leaf; 0 comes first.

    Args:
        order: Shell patterns over dotted names, where a name stands for everything below it: leaves that
            fit the first pattern come first, those that fit none come last. Or a function from a key path to
            a sortable value: the least comes first.
        infos: Of the leaves.

    Raises:
        HandlerFailedError: If the function raises, or its results cannot be compared.
    """
    if not callable(order):
        return [_first_fitting(order, info) for info in infos]

    try:
        places: list[Any] = [order(info.keys) for info in infos]
        rank = {place: at for at, place in enumerate(sorted(set(places)))}
    except Exception as error:
        raise HandlerFailedError("", "order", f"{type(error).__name__}: {error}") from error

    return [rank[place] for place in places]


def _first_fitting(patterns: Sequence[str], info: ParamInfo) -> int:
    for at, pattern in enumerate(patterns):
        if pattern_fits(pattern, info.name, info.keys):
            return at

    return len(patterns)


@final
class _Sorter:
    __slots__ = ("_batches", "_order", "_run")

    def __init__(self, order: Order, run: RestoreRun) -> None:
        self._order = order
        self._run = run
        self._batches: list[PlannedBatch] = []

    async def __call__(self, batch: PlannedBatch, /) -> None:
        self._batches.append(batch)

    async def finish(self) -> AsyncIterator[PlannedBatch]:
        batches, self._batches = self._batches, []
        plan = next((batch.plan for batch in batches if batch.plan is not None), None)
        if plan is None:
            return  # nothing came: the last stage reports that
        if not any(len(batch.leaves) for batch in batches):
            yield batches[0]  # it brings the plan
            return

        in_order = await self._run.threads.run(self._sorted, batches, plan)
        del batches
        in_order.reverse()
        while in_order:
            yield in_order.pop()  # and hold it no longer: the leaves belong to the next stage

    def _sorted(self, batches: list[PlannedBatch], plan: RestorePlan) -> list[PlannedBatch]:
        """Divide batches by rank. A call of a handler stays whole: it comes when its first leaf is due."""
        ranks = ranks_of(self._order, plan.infos)
        by_rank: dict[int, list[PlannedBatch]] = defaultdict(list)
        for batch in batches:
            leaves = ReadLeaves.of(batch.leaves)
            numbers: dict[int, list[int]] = defaultdict(list)
            for number, index in enumerate(leaves.indices):
                numbers[ranks[index]].append(number)

            if batch.handler is not None:
                by_rank[min(numbers)].append(batch)
                continue

            for rank, chosen in numbers.items():
                by_rank[rank].append(replace(batch, leaves=leaves.part(chosen)))

        return [batch for rank in sorted(by_rank) for batch in by_rank[rank]]
