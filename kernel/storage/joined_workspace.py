"""The place where another process builds a checkpoint, as one that only writes data files there sees it."""

from __future__ import annotations

__all__ = ("JoinedWorkspace",)

import errno
import os
from typing import TYPE_CHECKING, final

from anyio import Lock

from penstock.kernel.errors import PipelineError, StorageError

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.protocols.stores import Store


@final
class JoinedWorkspace:
    """What a `Workspace` is to the stages, for all processes of a job but the primary.

    The primary checks the destination, makes the place, publishes it and removes it.

    Args:
        store: Where the checkpoint will lie.
        threads: For the store's blocking calls.
        final: The checkpoint's own absolute path.
    """

    __slots__ = (
        "_lock",
        "_made",
        "_place",
        "_store",
        "_threads",
        "final",
        "identity",
        "left_behind",
        "published",
    )

    def __init__(self, store: Store, threads: Threads, final: str) -> None:
        self.final = final
        self.identity: object = None  #: the `Store.identity` of what was published
        self.left_behind: StorageError | None = None  #: never anything: the primary cleans up
        self.published = False  #: whether the checkpoint is known to be visible under its own name
        self._store = store
        self._threads = threads
        self._place: str | None = None
        self._lock = Lock(fast_acquire=True)
        self._made: set[str] = set()

    @property
    def temporary(self) -> str:
        """Where it is built; its own path until that is known."""
        return self.final if self._place is None else self._place

    def enter(self, place: str) -> None:
        """Note where the primary builds. Nothing can be written before."""
        self._place = place

    def path(self, relative: str) -> str:
        """Return where a file of the checkpoint is built.

        Raises:
            PipelineError: If the processes have not agreed yet.
        """
        if self._place is None:
            raise PipelineError("nothing can be written before the processes agree: keep the stage `agree`")

        return os.path.join(self._place, relative) if relative else self._place

    def check_now(self) -> None:
        """Check nothing: the primary does."""

    async def open(self, directory: str = "") -> None:
        """Make `directory` in the place, unless that was done before.

        Raises:
            PipelineError: If the processes have not agreed yet.
            StorageError: If the store refuses, or the primary has removed the place.
        """
        path = self.path(directory)
        if not directory or directory in self._made:
            return

        async with self._lock:
            if directory not in self._made:
                await self._threads.run(self._make, path)
                self._made.add(directory)

    def _make(self, path: str) -> None:
        # A process that slept through the end of the save must not bring back what the primary removed.
        if self._store.kind(self.temporary) is None:
            raise StorageError("mkdir", path, "the save was ended, and what it built removed", errno.ENOENT)

        self._store.make_directory(path)

    async def publish(self) -> None:
        """Note that the primary has published."""
        self.identity = await self._threads.run(self._store.identity, self.final)
        self.published = True

    async def discard(self) -> None:
        """Leave everything to the primary."""

    def release(self) -> None:
        """Hold nothing, so release nothing."""
