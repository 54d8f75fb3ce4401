"""Has the processes of a job agree on a save, before any of them writes a byte of it."""

from __future__ import annotations

__all__ = ("Agree", "agree_on_place", "agree_on_plan")

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.joint_plan import BaseLinks
from penstock.kernel.messages.save import SavePlan, StagedBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.stages.joint.arranged_files import make_files
from penstock.stages.joint.codec_votes import counted, with_codecs
from penstock.stages.joint.division import described_plan
from penstock.stages.messages.batching import plan_of


@final
@dataclass(frozen=True, slots=True)
class Agree:
    """Takes `StagedBatch`es and passes them on, once all processes want to save the same.

    After staging, so that no process waits for another one until its own state may change. Then the primary
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
    if run.operation.is_alone:  # the stage was put there by hand
        return plan

    encoded = await agree_on_plan(run, plan)
    ballot = None if plan.joint is None else plan.joint.ballot
    if ballot is None:
        return plan

    return await run.threads.run(with_codecs, plan, ballot.places, encoded, ballot.codecs)


async def agree_on_plan(run: SaveRun, plan: SavePlan) -> bytes:
    """Wait until all processes want to save the same, and there is a place to build in.

    Called by any stage that needs the place: the first call does it, and any other returns the same.

    Returns:
        For each leaf on the ballot, which codec it gets.

    Raises:
        PlansDifferError: If the processes do not save the same.
        PeerError: If another process ended the save, or does not come.
    """
    joint = plan.joint
    if joint is None:
        raise PipelineError("the plan does not say what each process writes: keep the stage `flatten`")

    votes = b"" if joint.ballot is None else joint.ballot.votes
    describe = partial(described_plan, plan, joint.held_whole, joint.options)
    prepare = partial(make_files, run, plan)
    return await agree_on_place(run, joint.digest, describe, votes, joint.links, prepare)


async def agree_on_place(
    run: SaveRun,
    digest: bytes,
    describe: Callable[[], Sequence[str]],
    votes: bytes = b"",
    links: BaseLinks | None = None,
    prepare: Callable[[], None] | None = None,
) -> bytes:
    """Wait until all processes are asked the same, and make or enter the place.

    Args:
        run: Of the save.
        digest: Of all that must be the same.
        describe: Returns that in words; see `Operation.agree`.
        votes: On the leaves whose codec all choose together.
        links: What this process links into the place from a base.
        prepare: Called by the primary, in a worker thread, once there is a place, before the others hear so.

    Returns:
        What the votes come to.
    """
    operation, workspace = run.operation, run.workspace

    async def begin(votes: Mapping[int, bytes]) -> tuple[str, bytes]:
        if not operation.is_local:
            # A process that sleeps until the next save knows another name, and cannot write there.
            workspace.build_below(operation.identity)

        await workspace.open()
        if prepare is not None:
            await run.threads.run(prepare)

        return workspace.path(""), counted(list(votes.values()))

    async def enter(place: str) -> None:
        await workspace.enter(place)
        if links is not None:
            from penstock.stages.joint.base_links import make_links  # most saves have no base

            await make_links(run, links)

        operation.at("write")

    operation.at("agree")
    _, encoded = await operation.agree(digest, describe, begin, votes, enter)
    return encoded
