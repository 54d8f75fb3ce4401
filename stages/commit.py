"""Waits for every leaf, then writes the documents that make data files a checkpoint."""

from __future__ import annotations

__all__ = ("Commit",)

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, final

from penstock.kernel.messages.save import Committed, References, SavePlan, WrittenBatch, in_columns
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.stages.files import commit_own
from penstock.stages.messages.batching import plan_of


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
        busy=(
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
        yield _Committer(run)


@final
class _Committer:
    __slots__ = ("_batches", "_run")

    def __init__(self, run: SaveRun) -> None:
        self._run = run
        self._batches: list[WrittenBatch] = []

    async def __call__(self, batch: WrittenBatch, /) -> None:
        self._batches.append(batch)

    async def finish(self) -> AsyncIterator[Committed]:
        run, batches = self._run, self._batches
        run.operation.at("commit")
        plan = plan_of(batches)
        nbytes = sum([batch.nbytes for batch in batches])
        nbytes_kept = 0 if plan.kept is None else plan.kept.nbytes
        if plan.kept is not None:
            batches.append(plan.kept)

        # A process alone has no parts of others to merge, and loads none of the modules for that.
        if run.operation.is_alone:
            await run.workspace.open()  # a save without array bytes comes here before any file was written
            n_files = await commit_own(run, plan, batches)
        else:
            from penstock.stages.joint_commit import JointCommit

            n_files = await JointCommit(run, batches).commit(plan)

        run.operation.at("publish")
        yield Committed(len(plan.infos), nbytes, n_files, nbytes_kept, _linkable(plan, batches))


def _linkable(plan: SavePlan, batches: Sequence[WrittenBatch]) -> References:
    """Leave out what was encoded: no later save links it, and so none need look at this checkpoint for it."""
    if plan.sizes_known:  # then nothing has a codec
        return plan.references

    columns = [in_columns(batch.leaves) for batch in batches]
    coded = {
        plan.infos[index].name
        for each in columns
        for index, spec in zip(each.indices, each.specs, strict=True)
        if spec.codec is not None
    }
    return {name: found for name, found in plan.references.items() if name not in coded}
