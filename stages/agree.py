"""Has the processes of a job agree on a save, before any of them writes a byte of it."""

from __future__ import annotations

__all__ = ("Agree",)

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, final

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.save import SavePlan, StagedBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.stages.joint.codec_votes import with_codecs
from penstock.stages.messages.batching import plan_of


@final
@dataclass(frozen=True, slots=True)
class Agree:
    """Takes `StagedBatch`es and passes them on, once all processes want to save the same.

    Behind staging, so that no process waits for another one until its own state may change. Then the primary
    makes the place to build in, and tells the others where it is; on local disks each makes its own. Leaves
    whose handlers write files of their own need the place to be staged: for them the processes agree there.

    Raises:
        PlansDifferError: If the processes do not save the same.
        PeerSilentError: If one of them does not come.
    """

    messages: ClassVar[Messages] = {StagedBatch: StagedBatch}
    advice: ClassVar[Advice] = Advice(
        "It waits for the slowest process to begin its save; `[processes] join_s` bounds that.",
    )

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        agreed: SavePlan | None = None

        async def agree(batch: StagedBatch, /) -> StagedBatch:
            nonlocal agreed
            if agreed is None:
                agreed = await _agreed(run, plan_of([batch]))

            return batch if batch.plan is agreed else replace(batch, plan=agreed)

        yield agree


async def _agreed(run: SaveRun, plan: SavePlan) -> SavePlan:
    """Wait for the others; return the plan with the codecs that all decided about together."""
    joint = plan.joint
    if run.operation.is_alone:  # the stage was put there by hand
        return plan
    if joint is None:
        raise PipelineError("the plan does not say what each process writes: keep the stage `flatten`")

    encoded, ballot = await joint.agree(joint), joint.ballot
    if ballot is None:
        return plan

    return await run.threads.run(with_codecs, plan, ballot.places, encoded, ballot.codec)
