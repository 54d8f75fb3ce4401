"""Puts all leaves of a restore into the order that the caller chose."""

from __future__ import annotations

__all__ = ("InOrder", "ranks_of")

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

from penstock.kernel.errors import HandlerFailedError
from penstock.kernel.messages.packs import ReadPack
from penstock.kernel.messages.restore import Order, RestorePlan
from penstock.kernel.messages.save import LeafBatch
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.leaf import ParamInfo
from penstock.kernel.protocols.leaf_handlers import ReadLeaf
from penstock.stages.messages.batching import batched
from penstock.stages.planning.key_patterns import pattern_fits


@final
@dataclass(frozen=True, slots=True)
class InOrder:
    """Holds back every leaf until it has seen the last one, and passes them on rank by rank.

    Attributes:
        order: As for `ranks_of`.
    """

    messages: ClassVar[Messages] = {LeafBatch[ReadLeaf]: LeafBatch[ReadLeaf]}

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


_Rank: TypeAlias = tuple[list[LeafBatch[ReadLeaf]], list[ReadPack], list[ReadLeaf]]
"""What stays together: batches of handlers with files of their own, packs, and all other leaves."""


@final
class _Sorter:
    __slots__ = ("_leaves", "_order", "_owned", "_packs", "_plan", "_run")

    def __init__(self, order: Order, run: RestoreRun) -> None:
        self._order = order
        self._run = run
        self._leaves: list[ReadLeaf] = []
        self._packs: list[ReadPack] = []
        self._owned: list[LeafBatch[ReadLeaf]] = []
        self._plan: RestorePlan | None = None

    async def __call__(self, batch: LeafBatch[ReadLeaf], /) -> None:
        self._plan = batch.plan or self._plan
        if batch.handler is not None:
            self._owned.append(batch)
        elif isinstance(batch.leaves, ReadPack):
            self._packs.append(batch.leaves)
        else:
            self._leaves.extend(batch.leaves)

    async def finish(self) -> AsyncIterator[LeafBatch[ReadLeaf]]:
        plan = self._plan
        if plan is None:
            return  # nothing came: the last stage reports that
        if not self._leaves and not self._packs and not self._owned:
            yield LeafBatch((), plan=plan)

        sorted_out = await self._run.threads.run(self._sort, plan)
        for owned, packs, leaves in sorted_out:
            for batch in owned:
                yield batch

            for pack in packs:
                yield LeafBatch(pack, plan=plan)

            for batch in batched(leaves, self._run.limits, plan=plan):
                yield batch
                del batch  # the leaves belong to whoever comes next

    def _sort(self, plan: RestorePlan) -> list[_Rank]:
        ranks = ranks_of(self._order, plan.infos)
        by_rank: dict[int, _Rank] = defaultdict(lambda: ([], [], []))
        for batch in self._owned:  # one call of a handler: all of it comes when its first leaf is due
            by_rank[min([ranks[leaf.index] for leaf in batch.leaves])][0].append(batch)

        for pack in self._packs:
            numbers: dict[int, list[int]] = defaultdict(list)
            for number, index in enumerate(pack.indices):
                numbers[ranks[index]].append(number)

            for rank, chosen in numbers.items():
                by_rank[rank][1].append(pack.part(chosen))

        for leaf in self._leaves:
            by_rank[ranks[leaf.index]][2].append(leaf)

        self._owned, self._packs, self._leaves = [], [], []
        return [by_rank[rank] for rank in sorted(by_rank)]
