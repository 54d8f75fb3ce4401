"""Waits for every leaf, then writes the documents that make data files a checkpoint."""

from __future__ import annotations

__all__ = ("Commit",)

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, final

from penstock.kernel.messages.leaves import Leaves
from penstock.kernel.messages.save import Committed, SavePlan, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.stages.files import finalize_handlers, write_documents
from penstock.stages.messages.batching import arrived_leaves, plan_of


@final
@dataclass(frozen=True, slots=True)
class Commit:
    """Takes `WrittenBatch`es, yields one `Committed` after the last.

    Each leaf is compared with its plan, spec included, and must have arrived whole: nothing is truncated or
    changed silently. The index, the metadata and, last, the commit mark are made durable in this order, then
    the directories. If several processes save together, the primary does that once it has heard from all
    what they wrote.

    Raises:
        ChangedLeafError: If a leaf is not stored as planned.
        IncompletePipelineError: If a leaf, or a byte of one, did not arrive.
    """

    messages: ClassVar[Messages] = {WrittenBatch: Committed}
    advice: ClassVar[Advice] = Advice(
        work=(
            "It makes the documents durable, and several processes wait there for the slowest one: "
            "save fewer and larger leaves."
        ),
        few_leaves=(
            "It makes a few small documents durable, which is the store's own time (several processes wait "
            "there for the slowest one): save less often, or to a faster `[store]`."
        ),
    )

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        # One process has no other parts to merge: it writes its documents in the trip to a thread that checks
        # the leaves, and loads none of the modules for parts.
        if run.operation.is_alone:
            yield _Committer(run)
            return

        from penstock.stages.joint_commit import JointCommitter

        yield JointCommitter(run)


@final
class _Committer:
    __slots__ = ("_batches", "_run")

    def __init__(self, run: SaveRun) -> None:
        self._run = run
        self._batches: list[WrittenBatch] = []

    async def __call__(self, batch: WrittenBatch, /) -> None:
        self._batches.append(batch)

    async def finish(self) -> AsyncIterator[Committed]:
        run = self._run
        # A save without array bytes comes here before any file was written.
        await run.workspace.open()
        nbytes = sum([batch.nbytes for batch in self._batches])
        plan = plan_of(self._batches)
        nbytes_kept = 0 if plan.kept is None else plan.kept.nbytes
        if plan.kept is not None:
            self._batches.append(plan.kept)

        leaves, n_files = await run.threads.run(self._commit, plan)
        if n_files is None:
            await finalize_handlers(run, [each for batch in self._batches for each in batch.handled])
            n_files = await run.threads.run(write_documents, run, leaves, plan, self._batches)

        yield Committed(len(leaves), nbytes, n_files, nbytes_kept, plan.references)

    def _commit(self, plan: SavePlan) -> tuple[Leaves, int | None]:
        """Check the leaves and write the documents, unless handlers must complete their files first."""
        leaves = arrived_leaves(plan, self._batches)
        if any(batch.handled for batch in self._batches):
            return leaves, None

        return leaves, write_documents(self._run, leaves, plan, self._batches)
