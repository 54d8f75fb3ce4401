"""Deletion of steps in the background, never while they are read here."""

from __future__ import annotations

__all__ = ("Deleter",)

import errno
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final, final

from anyio import Event, Lock, move_on_after
from structlog.stdlib import BoundLogger

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import PenstockError, RootInUseError, StorageError
from penstock.kernel.protocols.stores import Store
from penstock.steps.step_directory import delete_step

RETRY_S: Final = 1.0
"""Seconds until the deletion of a step that was being read is tried again."""


@final
class Deleter:
    """Deletes steps one after another; a step that is being read waits until it is not.

    A step disappears atomically, by a rename; a crash leaves it whole or as a temporary directory. So a
    deletion that the medium keeps from ending can be left to its thread: it does what is begun, and begins
    nothing any more.

    Args:
        store: Where `root` is.
        threads: For its blocking calls, which a cancellation may leave.
        root: The directory of steps.
        trash: A folder in `root` that steps are moved to instead; None to remove them.
        events: Where failures are logged.
        on_outcome: Called with a step, its name, and the error; or None once it is gone.
        hold: Entered for each deletion, in its thread; makes sure that the root is held.
        deletes: False if another process of the job deletes them, and here they are only forgotten.
        is_patient: Whether a root that another manager holds is waited for, as a step that is being read.
    """

    def __init__(
        self,
        store: Store,
        threads: Threads,
        root: str,
        *,
        trash: str | None,
        events: BoundLogger,
        on_outcome: Callable[[int, str, PenstockError | None], object],
        hold: Callable[[], AbstractContextManager[object]] = nullcontext,
        deletes: bool = True,
        is_patient: bool = False,
    ) -> None:
        self._deletes = deletes
        self._is_patient = is_patient
        self._kept: set[int] = set()  # steps that wait for the root, which was logged
        self._hold = hold
        self._store = store
        self._threads = threads
        self._root = root
        self._trash = trash
        self._events = events
        self._on_outcome = on_outcome
        self._waiting: dict[int, str] = {}
        self._busy: tuple[int, Event] | None = None  # the step being deleted, and when that is over
        self._ended = False
        self._asked = Event()
        self._turn = Lock()

    @property
    def waiting(self) -> Mapping[int, str]:
        """Steps that are to be deleted and still exist."""
        return self._waiting

    def ask(self, steps: Mapping[int, str]) -> None:
        """Request the deletion of steps: number to directory name."""
        if not self._deletes:
            for step, name in steps.items():
                self._on_outcome(step, name, None)
            return

        self._waiting.update(steps)
        self._asked.set()

    async def forget(self, step: int) -> None:
        """Take back the request for a step; if it is being deleted already, return when that is over."""
        self._waiting.pop(step, None)
        if self._busy is not None and self._busy[0] == step:
            await self._busy[1].wait()

    async def delete(self, step: int, name: str) -> None:
        """Delete a step at once: it is gone when this returns.

        Raises:
            StorageError: If it could not be deleted, for instance because it is being read.
            RootInUseError: If another manager holds the root.
        """
        async with self._turn:
            await self._delete_called(step, name)

    def end(self) -> None:
        """Begin no deletion any more, also not in calls that were left to their threads."""
        self._ended = True

    async def run(self) -> None:
        """Delete requested steps, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = Event()
            await self.attempt()
            while self._waiting and not self._asked.is_set():
                with move_on_after(RETRY_S):
                    await self._asked.wait()

                await self.attempt()

    async def attempt(self, within_s: float = math.inf) -> None:
        """Try every waiting step once, for at most so many seconds; what hangs then is logged and left.

        Cancellation:
            Leaves the deletion under way to its thread.
        """
        with move_on_after(within_s) as limit:
            async with self._turn:
                for step, name in tuple(self._waiting.items()):
                    if step in self._waiting:
                        await self._try(step, name)

        if limit.cancelled_caught:
            self._events.warning("step.deletion_hangs", steps=list(self._waiting), seconds=within_s)

    async def _try(self, step: int, name: str) -> None:
        over = Event()
        self._busy = (step, over)
        try:
            await self._delete(step, name)
        finally:
            self._busy = None
            over.set()

    async def _delete(self, step: int, name: str) -> None:
        problem: PenstockError | None = None
        try:
            await self._delete_called(step, name)
        except (StorageError, RootInUseError) as error:
            if isinstance(error, StorageError) and error.errno == errno.EBUSY:
                return
            if isinstance(error, RootInUseError) and self._is_patient:
                if step not in self._kept:
                    self._kept.add(step)
                    self._events.warning("step.not_deleted", step=step, error=repr(error))
                return

            problem = error
            self._events.warning("step.not_deleted", step=step, error=repr(error))

        self._waiting.pop(step, None)
        self._on_outcome(step, name, problem)

    async def _delete_called(self, step: int, name: str) -> None:
        left = await self._threads.run(self._delete_now, name)
        self._events.info("step.deleted", step=step, trash=self._trash)
        if left is not None:  # it is no step any more
            self._events.warning("step.left_behind", path=left.path, error=repr(left))

    def _delete_now(self, name: str) -> StorageError | None:
        if self._ended:
            return None

        with self._hold():
            return delete_step(self._store, self._root, name, self._trash, is_wanted=lambda: not self._ended)
