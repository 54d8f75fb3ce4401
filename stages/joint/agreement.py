"""The processes of a job agree before any of them writes a byte."""

from __future__ import annotations

__all__ = ("Agreement",)

from collections.abc import Callable
from typing import final

from anyio import Lock

from penstock.kernel.messages.joint_plan import JointPlan
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.stages.joint.codec_votes import counted


@final
class Agreement:
    """Of one save: reached once, by whichever stage needs it first.

    Args:
        run: Of the save.
        prepare: Called by the primary, in a worker thread, once there is a place, before the others hear so.
    """

    __slots__ = ("_encoded", "_lock", "_prepare", "_run")

    def __init__(self, run: SaveRun, prepare: Callable[[], None] | None) -> None:
        self._run = run
        self._prepare = prepare
        self._lock = Lock(fast_acquire=True)
        self._encoded: bytes | None = None

    async def reach(self, joint: JointPlan) -> bytes:
        """Wait until all processes want to save the same; see `JointPlan.agree`."""
        async with self._lock:
            if self._encoded is None:
                self._encoded = await self._reach(joint)

            return self._encoded

    async def _reach(self, joint: JointPlan) -> bytes:
        run, operation, workspace = self._run, self._run.operation, self._run.workspace
        operation.at("agree")
        votes = b"" if joint.ballot is None else joint.ballot.votes
        others = await operation.agree(joint.digest, joint.describe, votes)
        if not operation.is_primary:
            place, encoded = await operation.wait_begun(joint.digest, joint.describe)
            await workspace.enter(place)
        else:
            encoded = counted([votes, *others.values()])
            if not operation.is_local:
                # A process that sleeps until the next save knows another name, and cannot write there.
                workspace.build_below(operation.identity)

            await workspace.open()
            if self._prepare is not None:
                await run.threads.run(self._prepare)

            await operation.begin(workspace.path(""), encoded)

        if joint.links is not None:
            from penstock.stages.joint.base_links import make_links  # most saves have no base

            await make_links(run, joint.links)

        operation.at("write")
        return encoded
