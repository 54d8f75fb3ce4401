"""Deletion of steps in the background, never while they are read here; and of what crashed saves left."""

from __future__ import annotations

__all__ = ("Deleter", "delete_step", "prepare_root")

import errno
import os
from collections.abc import Callable, Mapping
from typing import Final, final

from anyio import Event, Lock, move_on_after
from structlog.stdlib import BoundLogger

from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import InUseError, StorageError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.deletion import delete_checkpoint, move_checkpoint, remove_abandoned
from penstock.steps import step_directory as on_disk
from penstock.steps.manager_opening import Opening
from penstock.steps.step_directory import DELETED
from penstock.steps.step_names import NameFormat

RETRY_S: Final = 1.0
"""Seconds until the deletion of a step that was being read is tried again."""


@final
class Deleter:
    """Deletes steps one after another; a step that is being read waits until it is not.

    A step disappears atomically, by a rename; a crash leaves it whole or as a temporary directory.

    Args:
        store: Where `root` lies.
        threads: For its blocking calls.
        root: The directory of steps.
        trash: A folder in `root` that steps are moved to instead; None to remove them.
        events: Where failures are logged.
        on_outcome: Called with a step, its name, and the error; or None once it is gone.
    """

    def __init__(
        self,
        store: Store,
        threads: Threads,
        root: str,
        *,
        trash: str | None,
        events: BoundLogger,
        on_outcome: Callable[[int, str, StorageError | None], object],
    ) -> None:
        self._store = store
        self._threads = threads
        self._root = root
        self._trash = trash
        self._events = events
        self._on_outcome = on_outcome
        self._waiting: dict[int, str] = {}
        self._asked = Event()
        self._turn = Lock()

    @property
    def waiting(self) -> Mapping[int, str]:
        """Steps that are to be deleted and still exist."""
        return self._waiting

    def ask(self, steps: Mapping[int, str]) -> None:
        """Request the deletion of steps: number to directory name."""
        self._waiting.update(steps)
        self._asked.set()

    def forget(self, step: int) -> None:
        """Take back the request for a step; without effect if it is being deleted already."""
        self._waiting.pop(step, None)

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

    async def attempt(self) -> None:
        """Try every waiting step once.

        Cancellation:
            Between two steps.
        """
        async with self._turn:
            for step, name in tuple(self._waiting.items()):
                if step in self._waiting:
                    await self._try(step, name)

    async def _try(self, step: int, name: str) -> None:
        problem: StorageError | None = None
        try:
            left = await self._threads.run(delete_step, self._store, self._root, name, self._trash)
        except StorageError as error:
            if error.errno == errno.EBUSY:
                return

            problem = error
            self._events.warning("step.not_deleted", step=step, error=repr(error))
        else:
            self._events.info("step.deleted", step=step, trash=self._trash)
            if left is not None:  # it is no step any more
                self._events.warning("step.left_behind", path=left.path, error=repr(left))

        self._waiting.pop(step, None)
        self._on_outcome(step, name, problem)


def delete_step(store: Store, root: str, name: str, trash: str | None) -> StorageError | None:
    """Delete the step called `name` in `root`, or move it to the folder `trash` there. Blocking.

    Does nothing if it does not exist. Of a step that is a symbolic link, the link is deleted.

    Returns:
        Why something of it was left under a name that is no step's; None if it is gone.

    Raises:
        InUseError: If it is being read or saved.
        StorageError: If the medium refuses. The step is still there.
        UnsupportedByStoreError: If the store cannot move it to `trash`.
    """
    path = os.path.join(root, name)
    if store.kind(path) is None:
        return None

    if trash is not None:
        return move_checkpoint(store, path, os.path.join(root, trash, name))

    return delete_checkpoint(store, path, os.path.join(root, f"{DELETED}{name}{TEMPORARY_SUFFIX}"))


def prepare_root(store: Store, root: str, names: NameFormat, events: BoundLogger, opening: Opening) -> None:
    """Write the metadata of a root that is held, and remove what crashed saves left there. Blocking."""
    if opening.metadata is not None:
        on_disk.write_root_metadata(store, root, opening.metadata)
    if opening.clean:
        for name in on_disk.leftovers(store, root, names):
            _clean_up(store, os.path.join(root, name), events)


def _clean_up(store: Store, path: str, events: BoundLogger) -> None:
    try:
        remove_abandoned(store, path)
    except InUseError:
        return  # a live save holds the directory it builds in
    except StorageError as error:
        events.warning("step.left_behind", path=path, error=repr(error))
    else:
        events.info("step.cleaned_up", path=path)
