"""The place where another process builds a checkpoint, as one that only writes data files there sees it."""

from __future__ import annotations

__all__ = ("JoinedWorkspace",)

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from anyio import Lock, sleep

from penstock.handlers.stores.publishing.workspace import check_place
from penstock.kernel.errors import NotSharedError, PipelineError, StorageError
from penstock.kernel.protocols.stores import Directories

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.protocols.stores import BuildToken, Store

SEEN_AFTER_S: Final = (0.1, 0.3, 0.6, 1.0, 2.0, 4.0)
"""Between looks for what another process has made: a network's file system may show it some seconds later."""

GIVEN_UP: Final = "given-up"
"""In the place of the next save to the same path, which removes it: what was taken back."""


@final
class JoinedWorkspace:
    """A `Workspace` for all processes of a job but the primary.

    The primary checks the destination, makes the place, publishes it and removes it.

    Args:
        store: Where the checkpoint will be.
        threads: For the store's blocking calls.
        final: The checkpoint's own absolute path.
    """

    __slots__ = (
        "_lock",
        "_made",
        "_place",
        "_store",
        "_threads",
        "_token",
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
        self._token: BuildToken | None = None  # where the store knows a build by more than its path
        self._lock = Lock(fast_acquire=True)
        self._made: set[str] = set()

    @property
    def temporary(self) -> str:
        """The place where it is built; its own path until that is known."""
        return self.final if self._place is None else self._place

    @property
    def is_joined(self) -> bool:
        """True: the primary makes the place, publishes it and removes it."""
        return True

    async def enter(self, place: str, waits_s: Sequence[float] = SEEN_AFTER_S) -> None:
        """Note where the primary builds. Nothing can be written before.

        Args:
            place: It was made by the primary, a moment ago.
            waits_s: How long to wait between looks for it. A network's file system may show it late.

        Raises:
            NotSharedError: If this process does not see it: the processes have disks of their own.
            StorageError: If the store cannot be asked.
        """
        store = self._store
        if (objects := store.objects) is not None:
            self._token = await self._threads.run(objects.join_build, self.final, place)
        else:
            waits = iter(waits_s)
            while await self._threads.run(store.kind, place) is None:
                wait_s = next(waits, None)
                if wait_s is None:
                    raise NotSharedError(self.final, place)

                await sleep(wait_s)

        self._place = place

    def path(self, relative: str) -> str:
        """Return where a file of the checkpoint is built.

        Raises:
            PipelineError: If the processes have not agreed yet.
        """
        if self._place is None:
            raise PipelineError("nothing can be written before the processes agree: keep the stage `agree`")

        return os.path.join(self._place, relative) if relative else self._place

    def build_below(self, folder: str) -> None:
        """Leave it to the primary, which tells the place."""

    async def restart(self) -> None:
        """Leave everything to the primary."""

    def check_now(self) -> None:
        """Check nothing: the primary does."""

    async def open(self, directory: str = "") -> None:
        """Make `directory` in the place, unless that was done before.

        Raises:
            PipelineError: If the processes have not agreed yet.
            StorageError: If the store refuses, or the primary has removed the place.
        """
        self.path(directory)  # whether there is a place
        if not directory or directory in self._made:
            return

        async with self._lock:
            if directory not in self._made:
                await self._threads.run(self.make_directory, directory)
                self._made.add(directory)

    def make_directory(self, relative: str) -> None:
        """Make a directory of the checkpoint, with those that it is in. Blocking.

        Raises:
            StorageError: If the store refuses, or the primary has removed the place.
        """
        check_place(self._store, self.temporary)
        self._store.make_directory(self.path(relative))

    async def publish(self) -> None:
        """Note that the primary has published."""
        self.identity = await self._threads.run(self._store.identity, self.final)
        self.published = True

    async def take_back(self) -> bool:
        """Take the place away from the primary, which is silent; return whether it can publish no more.

        It publishes by a rename of what is in the place. So whoever renames first decides, without a word
        to anybody: this, or the primary when it wakes. What was taken is where the next save removes it,
        and the hold of the primary is on that, so it is in nobody's way. An `ObjectStore` has another
        way.

        Returns:
            False also where the store can do neither, or does not answer.

        Cancellation:
            At once; it goes on in its thread.
        """
        if self._place is None:
            return False

        return await self._threads.leaving_calls(0.0).run(self._take_back, self._place)

    def _take_back(self, built: str) -> bool:
        store = self._store
        if (objects := store.objects) is not None and self._token is not None:
            try:
                return objects.take_back(self._token)
            except StorageError:
                return False

        if (directories := store.directories) is None:
            return False

        place, identity = os.path.split(built)
        aside = f"{place}-{identity}"
        try:
            if store.kind(built) is not None:
                directories.rename(place, aside)
        except StorageError:  # another process was faster, or the primary is awake
            pass
        else:
            if store.kind(os.path.join(aside, identity)) is not None:
                self._put_down(directories, aside, place)
                return True

            with suppress(StorageError):  # the primary has left it just now, and somebody else has come
                directories.rename(aside, place)

        taken = (aside, os.path.join(place, GIVEN_UP))
        return any(store.kind(os.path.join(folder, identity)) is not None for folder in taken)

    @staticmethod
    def _put_down(store: Directories, aside: str, place: str) -> None:
        """Put what was taken where the next save finds it, unless there is one already."""
        try:
            hold = store.make_held(place)
        except StorageError:
            return

        try:
            with suppress(StorageError):
                store.rename(aside, os.path.join(place, GIVEN_UP))
        finally:
            hold.release()

    async def discard(self) -> None:
        """Leave everything to the primary."""

    async def withdraw(self) -> None:
        """Leave everything to the primary."""

    def release(self) -> None:
        """Write there no more. Idempotent."""
        token, self._token = self._token, None
        if token is not None:
            self._store.discard(token)
