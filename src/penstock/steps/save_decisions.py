"""Decides if a step is saved: by policy, once the process was asked to end, and for all processes alike."""

from __future__ import annotations

__all__ = ("JobDecisions", "SaveDecisions", "hear_sigterm")

import json
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar, cast, final

from anyio import TASK_STATUS_IGNORED, open_signal_receiver
from anyio.abc import TaskStatus

from penstock.kernel.errors import PeerFailedError
from penstock.kernel.events import get_logger
from penstock.kernel.protocols.coordinator import Announcements, Coordinator
from penstock.steps.save_policies import SaveMoment, SavePolicy, follows_from_step

T = TypeVar("T")

# Decisions are values of the coordination service, which holds them in memory.
MOST_TEXT: Final = 2000
PREEMPTED: Final = "preempted"


@final
class JobDecisions:
    """Has the primary of a job decide, and the others do as it says, by name. All ask in the same order.

    Args:
        coordinator: Of the processes that decide together.
        about: What they decide about, the same in all.
    """

    __slots__ = ("announcements", "coordinator")

    def __init__(self, coordinator: Coordinator, about: str) -> None:
        self.coordinator = coordinator
        self.announcements: Announcements | None = coordinator.announcements(about)
        """How the primary tells the others what it decided; None if there are none."""

    async def decide(
        self,
        name: str,
        own: Callable[[], Awaitable[T]],
        what: str | None = None,
        *,
        is_again: bool = False,
    ) -> T:
        """Return what `own()` returns in the primary, in all processes.

        Args:
            name: What it is about; the same in all.
            own: Called in the primary alone; returns what JSON can hold.
            what: What failed, in the error of the others, if it raises.
            is_again: See `Announcements`.

        Raises:
            Exception: What `own` raises; in the others, a `PeerFailedError` that names it.
            PeerSilentError: If the primary does not say.
            CoordinationError: If the service cannot be reached.
        """
        if self.announcements is None:
            return await own()
        if not self.coordinator.is_primary:  # one decides, so that no two can differ
            value, problem = json.loads(await self.announcements.hear(name, is_again=is_again))
            if problem is not None:
                raise PeerFailedError(self.coordinator.processes[0], what, None, problem)

            return cast("T", value)

        try:
            found = await own()
        except Exception as error:  # otherwise the others would wait
            problem = f"{type(error).__name__}: {error}"[:MOST_TEXT]
            await self.announcements.tell(name, json.dumps([None, problem]), is_again=is_again)
            raise

        await self.announcements.tell(name, json.dumps([found, None]), is_again=is_again)
        return found


@final
class SaveDecisions:
    """Asks a policy. In a job of several processes the primary does, and the others obey.

    A policy that looks at the step alone says the same everywhere, so there each process asks its own.

    Args:
        policy: Which steps are saved.
        there: Returns the steps that are saved or being saved, ascending, and whether one is being saved.
        job: How the primary tells the others.
    """

    def __init__(
        self, policy: SavePolicy, there: Callable[[], tuple[Sequence[int], bool]], job: JobDecisions
    ) -> None:
        self._policy = policy
        self._there = there
        self._job = job
        self._announcements = None if follows_from_step(policy) else job.announcements
        self._saved_s = time.monotonic()
        self._was_told = False  # this process, and the others do not know yet
        self._answered = False  # whether a save was begun since the preemption
        self.preempted = False  #: whether the process was asked to end; one of them, if they decide together

    def preempt(self) -> None:
        """Note that the process was asked to end. From any thread, or a signal handler."""
        if self._announcements is None:
            self._note_preempted()
        else:  # the others must hear of it before the same step
            self._was_told = True

    def note_begun(self, begun_s: float) -> None:
        """Note that a save was begun, on the clock of `time.monotonic`."""
        self._saved_s = begun_s
        self._answered = True

    def says(self, step: int) -> bool:
        """True if the policy, as this process asks it, wants `step` to be saved."""
        steps, saving = self._there()
        moment = SaveMoment(
            step=step,
            now_s=time.monotonic(),
            steps=steps,
            saved_s=self._saved_s,
            saving=saving,
            preempted=self.preempted and not self._answered,
        )
        return self._policy.should_save(moment)

    async def wanted(self, step: int) -> bool:
        """True if `step` is to be saved, the same in all processes.

        Raises:
            Exception: What the policy raises; in the others, a `PeerFailedError` that tells it.
            PeerSilentError: If the primary does not say.
            CoordinationError: If the service cannot be reached.
        """
        announcements, name = self._announcements, f"save {step}"
        if announcements is None:
            return self.says(step)
        if self._job.coordinator.is_primary:  # it hears of a preemption of any, and decides with it
            was_asked = await announcements.take(PREEMPTED)
            if self._was_told or was_asked:
                self._was_told = False
                self._note_preempted()
        elif self._was_told:
            await announcements.ask(PREEMPTED)
            self._was_told = False

        async def own() -> list[bool]:
            return [bool(self.says(step)), self.preempted]

        is_wanted, preempted = await self._job.decide(name, own, "save_when")
        if preempted and not self.preempted:
            self._note_preempted()

        return is_wanted

    def _note_preempted(self) -> None:
        self._answered = False
        self.preempted = True


async def hear_sigterm(
    told: Callable[[], object], *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED
) -> None:
    """Call `told` at each SIGTERM, which no longer ends the process, until cancelled.

    Python handles signals in the main thread only. In another thread this logs an event and returns.
    """
    if threading.current_thread() is not threading.main_thread():
        get_logger().warning("steps.no_signals", reason="not in the main thread")
        task_status.started()
        return

    with open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            told()
