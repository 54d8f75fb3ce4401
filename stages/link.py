"""Links what the base checkpoint holds already instead of writing it, once all leaves are staged."""

from __future__ import annotations

__all__ = ("Link",)

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, final

from penstock.kernel.messages.save import Extents, Leaves, SavePlan, StagedBatch, in_columns
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.stages.messages.batching import plan_of
from penstock.stages.reuse.incremental import set_aside


@final
@dataclass(frozen=True, slots=True)
class Link:
    """Takes `StagedBatch`es, yields them without the leaves that the base checkpoint holds.

    To open the base, and to compare a share of its bytes, takes longer than to stage leaves that are on the
    host: so it is done when the caller has gone on. Which leaves may be linked says the plan that the first
    message brings. It links none where the first stage has set aside what need not be written.
    """

    messages: ClassVar[Messages] = {StagedBatch: StagedBatch}
    advice: ClassVar[Advice] = Advice(
        "It compares what it links with its checksums: `[save] compare_linked_every` says how much of it.",
    )

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        yield _Linker(run)


@final
class _Linker:
    __slots__ = ("_gone", "_plan", "_run")

    def __init__(self, run: SaveRun) -> None:
        self._run = run
        self._plan: SavePlan | None = None
        self._gone: frozenset[int] = frozenset()  # the leaves that are linked

    async def __call__(self, batch: StagedBatch, /) -> StagedBatch:
        if self._plan is None:
            self._plan = await self._linked(plan_of([batch]))

        return replace(self._rest_of(batch) if self._gone else batch, plan=self._plan)

    async def _linked(self, plan: SavePlan) -> SavePlan:
        """Link what is intact of the leaves that may be linked; return the plan with them in `kept`."""
        if plan.unchanged is None:
            return plan

        leaves = Leaves(range(len(plan.infos)), plan.specs, None, plan.infos, plan.handlers)
        _, plan = await set_aside(self._run, leaves, plan)
        if plan.kept is not None:
            self._gone = frozenset(leaf.index for leaf in plan.kept.leaves)
            progress = self._run.progress
            progress.plan(progress.leaves_total, progress.bytes_total - plan.kept.nbytes)
            progress.advance(len(self._gone), 0)

        return plan

    def _rest_of(self, batch: StagedBatch) -> StagedBatch:
        """Drop the leaves that are linked, and the leases on their bytes."""
        leaves = in_columns(batch.leaves)
        left = leaves.part([at for at, index in enumerate(leaves.indices) if index not in self._gone])
        extents = tuple([part for each in batch.extents for part in _without(each, self._gone)])
        freed = sum([each.cost for each in batch.extents]) - sum([each.cost for each in extents])
        if batch.staged is not None and freed:
            (batch.staged.split(freed) if extents else batch.staged).release()

        return replace(batch, leaves=left if len(left) < len(leaves) else batch.leaves, extents=extents)


def _without(extents: Extents, gone: frozenset[int]) -> Iterator[Extents]:
    """Yield the extents of the other leaves."""
    indices = in_columns(extents.leaves).indices
    if gone.isdisjoint(indices):
        yield extents
    elif len(indices) > 1:
        flips = [at for at in range(1, len(indices)) if (indices[at] in gone) != (indices[at - 1] in gone)]
        for part in extents.divided([*flips, len(indices)]):
            if in_columns(part.leaves).indices[0] not in gone:
                yield part
