"""Has the processes of a job agree on a save, before any of them writes a byte of it."""

from __future__ import annotations

__all__ = ("Agree",)

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, final

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.save import StagedBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.storage.joined_workspace import JoinedWorkspace
from penstock.stages.common.planned_leaves import plan_of


@final
@dataclass(frozen=True, slots=True)
class Agree:
    """Takes `StagedBatch`es and passes them on, once all processes want to save the same.

    Behind staging, so that no process waits for another one until its own state may change. Then the primary
    makes the place to build in, and tells the others where it is.

    Raises:
        PlansDifferError: If the processes do not save the same.
        PeerSilentError: If one of them does not come.
    """

    messages: ClassVar[Messages] = {StagedBatch: StagedBatch}

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        has_agreed = False

        async def agree(batch: StagedBatch, /) -> StagedBatch:
            nonlocal has_agreed
            if not has_agreed:
                await _agree(run, batch)
                has_agreed = True

            return batch

        yield agree


async def _agree(run: SaveRun, batch: StagedBatch) -> None:
    operation, joint, workspace = run.operation, plan_of([batch]).joint, run.workspace
    if operation is None:
        return
    if joint is None:
        raise PipelineError("the plan does not say what each process writes: keep the stage `flatten`")

    operation.at("agree")
    await operation.agree(joint.digest, joint.describe)
    if isinstance(workspace, JoinedWorkspace):
        workspace.enter(await operation.wait_begun(joint.digest, joint.describe))
    else:
        # A process that sleeps until the next save knows another name, and cannot write into that one.
        workspace.build_below(operation.identity)
        await workspace.open()
        await operation.begin(workspace.path(""))

    if joint.links is not None:
        from penstock.stages.joint.base_links import make_links  # most saves have no base

        await make_links(run, joint.links)

    operation.at("write")
