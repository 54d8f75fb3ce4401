"""The last stage of a restore: values to a tree."""

from __future__ import annotations

__all__ = ("Assemble",)

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, final

from penstock.kernel.errors import IncompletePipelineError
from penstock.kernel.messages.restore import RestoredBatch, RestoredTree, RestorePlan
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.stages.messages.batching import require_plan
from penstock.stages.reuse.value_cache import references_to

REMEMBERED_FROM = 64 * 1024  # bytes; smaller leaves are not worth remembering


@final
@dataclass(frozen=True, slots=True)
class Assemble:
    """Takes `RestoredBatch`es, yields one `RestoredTree` after the last.

    Raises:
        IncompletePipelineError: If a leaf did not arrive.
        PipelineError: If no batch brought the plan.
    """

    messages: ClassVar[Messages] = {RestoredBatch: RestoredTree}
    advice: ClassVar[Advice] = Advice(
        busy="Its time grows with the number of leaves: restore fewer, with `only=`.",
        few_leaves=(
            "For so few leaves that is what a first restore loads (`penstock.warm_up()` does it before), or "
            "a type handler that takes its time."
        ),
    )

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""
        yield _Assembler(run)


@final
class _Assembler:
    __slots__ = ("_plan", "_run", "_values")

    def __init__(self, run: RestoreRun) -> None:
        self._run = run
        self._plan: RestorePlan | None = None
        self._values: dict[int, object] = {}

    async def __call__(self, batch: RestoredBatch, /) -> None:
        self._plan = self._plan or batch.plan
        self._values.update(batch.values)

    async def finish(self) -> AsyncIterator[RestoredTree]:
        yield await self._run.threads.run(self._assemble, require_plan(self._plan))

    def _assemble(self, plan: RestorePlan) -> RestoredTree:
        total = len(plan.infos)
        for leaf in plan.computed:  # of values of one process; all others a stage `derive` has made
            if leaf.index not in self._values and all(at in self._values for at in leaf.inputs):
                self._values[leaf.index] = leaf.make([self._values[at] for at in leaf.inputs])

        absent = [at for at in range(total) if at not in self._values]
        if absent:
            key_path = plan.infos[absent[0]].key_path
            raise IncompletePipelineError(total, total - len(absent), key_path)

        values = [self._values[at] for at in range(total)]
        tree = plan.unflatten(values)
        if plan.changes:  # then values may differ from what is stored, and a later save writes all of them
            return RestoredTree(tree, plan)

        large = [at for at in plan.read_alone if getattr(values[at], "nbytes", 0) >= REMEMBERED_FROM]
        if not large:
            return RestoredTree(tree, plan)

        infos, chosen = [plan.infos[at] for at in large], [values[at] for at in large]
        handlers = [self._run.registry.lookup(type(value), "") for value in chosen]
        return RestoredTree(tree, plan, references_to(infos, chosen, handlers))
