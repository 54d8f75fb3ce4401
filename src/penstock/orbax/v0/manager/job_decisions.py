"""What the managers of one directory, one in each process of a job, must do alike: process 0 decides it."""

from __future__ import annotations

__all__ = ("JobDecisions",)

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar, cast, final

from penstock.blocking.loop_thread import LoopThread
from penstock.checkpointer.checkpointer import Checkpointer
from penstock.kernel.errors import PeerFailedError
from penstock.kernel.protocols.coordinator import Announcements
from penstock.kernel.storage.paths import path_or_url
from penstock.orbax.common.job_processes import process_index
from penstock.orbax.v0.common.joint_directory import active_processes, is_joint, job_options
from penstock.orbax.v0.common.v0_options import MultiprocessingOptions
from penstock.orbax.v0.manager.manager_options import CheckpointManagerOptions
from penstock.orbax.v0.manager.manager_root import CheckpointInfo, Root, divided
from penstock.orbax.v0.manager.own_policies import own_policy_of
from penstock.orbax.v0.manager.preservation_policy import PreservationPolicy
from penstock.orbax.v0.manager.save_decision_policy import (
    AnySavePolicy,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)
from penstock.steps.save_policies import follows_from_step

T = TypeVar("T")

_ALIKE = (FixedIntervalPolicy, SpecificStepsPolicy, InitialSavePolicy, PreemptionCheckpointingPolicy)


@final
class JobDecisions:
    """Has process 0 decide, and the others do as it says. All ask in the same order. Blocking.

    It owns an event loop in a thread, from the first decision until `close`. A process that works alone
    decides for itself, and has no such loop.

    Args:
        directory: Of the steps.
        options: Those of the manager. One that only reads decides nothing.
    """

    def __init__(self, directory: Any, options: CheckpointManagerOptions) -> None:
        processes = options.multiprocessing_options
        jointly = is_joint(processes) and not options.read_only
        self._primary = active_processes(processes)[0]
        make = partial(_announcements, path_or_url(directory), processes)
        self._loop = LoopThread(make, name="penstock.orbax") if jointly else None
        self.is_alone = self._loop is None  #: whether there are no others
        self.is_primary = self.is_alone or process_index() == self._primary  #: whether this one decides

    def decided(self, name: str, decide: Callable[[], T]) -> T:
        """Return what `decide()` returns in the process that decides.

        Args:
            name: What it is about; the same in all processes.
            decide: Called in that process alone; returns what JSON can hold.

        Raises:
            Exception: What `decide` raises; in the others, a `PeerFailedError` that tells it.
            PeerSilentError: If process 0 does not say.
        """
        if self._loop is None:
            return decide()
        if not self.is_primary:
            found, problem = json.loads(self._loop.call(_hear, name))
            if problem is not None:
                raise PeerFailedError(self._primary, None, None, problem)

            return cast("T", found)

        try:
            own = decide()
        except Exception as error:
            self._tell_failure(name, error)
            raise

        self._loop.call(_tell, name, json.dumps([own, None]))
        return own

    def wanted(self, step: int, policy: SaveDecisionPolicy, says: Callable[[int], bool]) -> bool:
        """Whether a step is saved.

        Args:
            step: Its number.
            policy: One that says the same everywhere is not asked about: most steps are not saved, and cost
                no call.
            says: Asks it. In all processes, since jax has them ask together whether the job is to end.

        Raises:
            Exception: What the policy raises in the process that decides; in the others, as `decided`.
        """
        own, is_alike = False, _says_alike(policy)
        try:
            own = says(step)
        except Exception as error:
            if not is_alike and self.is_primary:
                self._tell_failure(f"save {step}", error)
            if is_alike or self.is_primary:
                raise

        return own if is_alike else self.decided(f"save {step}", lambda: own)

    def opened(self, root: Root, metadata: Mapping[str, Any] | None) -> list[CheckpointInfo]:
        """Prepare a directory; return its steps, in all processes those that the deciding one found."""
        root.prepare(metadata)
        found = root.infos() if self.is_primary else []
        steps = self.decided("open", lambda: [info.step for info in found])
        return found if self.is_primary else [info for info in root.infos() if info.step in steps]

    def doomed(
        self, policy: PreservationPolicy, step: int, infos: Sequence[CheckpointInfo]
    ) -> tuple[list[int], Exception | None]:
        """Return which steps are to be deleted once a new one is durable; or none, and what a policy raises.

        To be asked before that step is saved: if the deciding process cannot, nobody waits for its answer.

        Args:
            policy: Which steps stay.
            step: The number of the new one.
            infos: All steps, with the new one.
        """

        def decide() -> list[int]:
            return [info.step for info in divided(policy, infos)[1]]

        try:
            return self.decided(f"delete after {step}", decide), None
        except Exception as error:
            return [], error

    def delete_after(self, step: int, root: Root, doomed: Sequence[int]) -> None:
        """Delete steps now that a new one is durable; return in all processes when that is done."""
        if doomed:
            self.decided(f"deleted after {step}", partial(root.delete_all, doomed))
        else:  # only those that were being read before
            root.delete_all(())

    def _tell_failure(self, name: str, error: Exception) -> None:
        if self._loop is not None:
            self._loop.call(_tell, name, json.dumps([None, f"{type(error).__name__}: {error}"]))

    def close(self) -> None:
        """End the thread."""
        if self._loop is not None:
            self._loop.close()


def _says_alike(policy: SaveDecisionPolicy) -> bool:
    """Whether what a policy says depends on the steps alone, or on what jax tells all processes alike."""
    if type(policy) is AnySavePolicy:
        return all(map(_says_alike, policy.policies))

    own = own_policy_of(policy)
    return type(policy) in _ALIKE if own is None else follows_from_step(own)


@asynccontextmanager
async def _announcements(root: str, processes: MultiprocessingOptions) -> AsyncGenerator[Announcements]:
    async with Checkpointer(job=job_options(processes)) as checkpointer:
        announcements = checkpointer.engine.coordinator.announcements(f"the steps of {root}")
        assert announcements is not None, "there are other processes"
        try:
            yield announcements
        finally:
            await announcements.leave()


async def _tell(announcements: Announcements, name: str, value: str) -> None:
    await announcements.tell(name, value)


async def _hear(announcements: Announcements, name: str) -> str:
    return await announcements.hear(name)
