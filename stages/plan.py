"""Decides what to read, from what is on disk and what the caller wants."""

from __future__ import annotations

__all__ = ("Plan",)

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar, final

from penstock.kernel.memory.memory_limit import MOST_EXPANSION
from penstock.kernel.messages.packs import ReadLeaf
from penstock.kernel.messages.restore import Located
from penstock.kernel.messages.save import LeafBatch
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.reports.statistics import Advice
from penstock.stages.messages.batching import batched
from penstock.stages.planning.mmap import map_leaves
from penstock.stages.planning.restore_planner import plan_restore


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Takes the `Located`, yields `LeafBatch[ReadLeaf]`es: small leaves in packs, then the others in order.

    Every batch refers to the `RestorePlan`. If nothing is read, one empty batch carries it.

    Raises:
        StructureMismatchError: If the target and the checkpoint differ; lists every difference.
        NoHandlerError: If no handler is registered for a type, wanted or stored.
        SpecError: If an option of the restore does not fit.
        ExpansionError: If there is no target, and the result would take too many times the bytes stored.
        InsufficientMemoryError: If the machine has less memory than the result takes.

    Attributes:
        max_expansion: How many times the bytes stored a result without a target may take.
    """

    messages: ClassVar[Messages] = {Located: LeafBatch[ReadLeaf]}
    advice: ClassVar[Advice] = Advice(
        work="Its time grows with the number of leaves: restore fewer, with `only=`.",
        few_leaves=(
            "For so few leaves that is what a first restore loads (`penstock.warm_up()` does it before), or "
            "a type handler that takes its time."
        ),
    )

    max_expansion: int = field(default=MOST_EXPANSION, metadata={"positive": True})

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""

        async def plan(located: Located, /) -> AsyncIterator[LeafBatch[ReadLeaf]]:
            result, packs, leaves = await run.threads.run(plan_restore, run, located, self.max_expansion)
            if located.request.options.mmap:
                leaves = await run.threads.run(
                    map_leaves, run, leaves, located.request.options.verify is True
                )

            n_leaves = sum([leaf.ends_leaf for leaf in leaves]) + sum([len(pack) for pack in packs])
            nbytes = sum([leaf.nbytes for leaf in leaves]) + sum([pack.nbytes for pack in packs])
            run.progress.plan(n_leaves, nbytes)
            if not n_leaves:
                yield LeafBatch((), plan=result)

            for pack in packs:
                yield LeafBatch(pack, plan=result)

            for batch in batched(leaves, run.limits, plan=result):
                yield batch
                del batch  # the next stage owns the leaves

        yield plan
