"""Decides which steps go when a new one is durable, and has them deleted."""

from __future__ import annotations

__all__ = ("Retention",)

import time
from typing import final

from anyio import Event

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError
from penstock.steps.catalogue import Catalogue
from penstock.steps.keep_policies import KeepPolicy, StepInfo, steps_to_delete
from penstock.steps.step_deletion import Deleter


@final
class Retention:
    """Strikes out of the catalogue what a policy does not keep. Used in the event loop.

    Args:
        catalogue: The steps there are.
        policy: Which of them stay.
        threads: For the policy, and for reading what it looks at.
    """

    __slots__ = ("_catalogue", "_outcomes", "_policy", "_threads", "deleter", "pins")

    def __init__(self, catalogue: Catalogue, policy: KeepPolicy, threads: Threads) -> None:
        self._catalogue = catalogue
        self._policy = policy
        self._threads = threads
        self._outcomes: dict[int, tuple[Event, list[StorageError]]] = {}
        self.pins: set[int] = set()  #: steps that stay whatever the policy says
        self.deleter: Deleter  #: set before anything else is asked

    async def apply(self, saved: int) -> None:
        """Decide what goes, now that a step is durable; that step and the last one stay.

        Raises:
            Exception: What the policy raises.
        """
        steps = self._catalogue.snapshot()
        doomed = await self._threads.run(self._decide, steps, saved)
        # Pinned is what is pinned now; what came since is no part of the decision, and stays.
        going = [step for step in doomed if step not in self.pins and step != self._catalogue.latest]
        self.deleter.ask(self._catalogue.remove(going))

    async def delete(self, step: int) -> None:
        """Delete a step and return when it is gone, which it is not while somebody reads it.

        Raises:
            StorageError: If it could not be deleted; it is still there then.

        Cancellation:
            It will be deleted all the same.
        """
        event, problems = self._outcomes.setdefault(step, (Event(), []))
        self.deleter.ask(self._catalogue.remove([step]))
        await event.wait()
        if problems:
            raise problems[0]

    def forget(self, step: int) -> None:
        """Do not delete a step that is saved anew; whoever waits for its end has waited long enough."""
        if step in self.deleter.waiting:
            self.deleter.forget(step)
            event, _ = self._outcomes.pop(step, (Event(), []))
            event.set()

    def note_outcome(self, step: int, name: str, problem: StorageError | None) -> None:
        """Take from the deleter what became of a step."""
        event, problems = self._outcomes.pop(step, (Event(), []))
        if problem is not None:
            self._catalogue.add(step, name)
            problems.append(problem)

        event.set()

    def _decide(self, steps: dict[int, str], saved: int) -> list[int]:
        infos: list[StepInfo] = self._catalogue.infos(steps, self._policy.needs)
        return steps_to_delete(self._policy, infos, time.time(), {saved})
