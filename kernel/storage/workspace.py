"""The directory a checkpoint is built in, from its first file to the rename that publishes it."""

from __future__ import annotations

__all__ = ("Workspace",)

import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from anyio import Lock

from penstock.kernel.errors import DestinationExistsError, PathError, StorageError

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.protocols.stores import Hold, Store


@final
class Workspace:
    """Makes, publishes and discards the temporary directory of one save.

    Nothing is written before `open` is first called, so that bad input leaves no trace.

    Args:
        store: Where.
        threads: For the store's blocking calls.
        final: The checkpoint's own absolute path.
        temporary: The absolute path it is built under, on the same file system. If it is `final`
            itself, somebody else made that directory, and will publish it or discard it.
        overwrite: Whether an existing checkpoint may be replaced.
        recognises: Says whether what lies at a path is a checkpoint, and so may be replaced; by
            default any directory is. Blocking.
        file: The one file in the workspace that becomes the checkpoint; None if all of it does.
    """

    __slots__ = (
        "_begun",
        "_file",
        "_hold",
        "_is_checked",
        "_lock",
        "_made",
        "_overwrite",
        "_recognises",
        "_store",
        "_threads",
        "final",
        "left_behind",
        "published",
        "temporary",
    )

    def __init__(
        self,
        store: Store,
        threads: Threads,
        final: str,
        temporary: str,
        *,
        overwrite: bool,
        recognises: Callable[[str], bool] = lambda _: True,
        file: str | None = None,
    ) -> None:
        self.final = final
        self.temporary = temporary
        self.left_behind: StorageError | None = None  #: why what was replaced is still there, beside it
        self.published = False  #: whether the checkpoint has its own name by now
        self._store = store
        self._threads = threads
        self._overwrite = overwrite
        self._recognises = recognises
        self._file = file
        self._lock = Lock()
        self._made: set[str] = set()
        self._is_checked = False
        self._begun = False  # whether there may be something to remove
        self._hold: Hold | None = None

    def path(self, relative: str) -> str:
        """Return where a file of the checkpoint is built; all of it, if `relative` is empty."""
        return os.path.join(self.temporary, relative) if relative else self.temporary

    @property
    def _in_place(self) -> bool:
        return self.temporary == self.final

    async def check(self) -> None:
        """Make sure that the save could be published, before anything is written.

        Raises:
            DestinationExistsError: If something is there and `overwrite` is off.
            PathError: If something is there that is no checkpoint.
            StorageError: If it could not be created.
        """
        await self._threads.run(self.check_now)

    def check_now(self) -> None:
        """Do the same, blocking: for who is in a thread already."""
        self._check()
        self._is_checked = True

    async def open(self, directory: str = "") -> None:
        """Make the workspace, and `directory` in it, unless that was done. Removes a stale one first.

        Raises:
            PenstockError: As `check`, if nobody did that before.
        """
        if directory in self._made:
            return

        async with self._lock:
            if "" not in self._made:
                await self._threads.run(self._make_root)
                self._made.add("")

            if directory not in self._made:
                await self._threads.run(self._store.make_directory, self.path(directory))
                self._made.add(directory)

    async def publish(self) -> None:
        """Give the checkpoint its own name, atomically and durably.

        Raises:
            DestinationExistsError: If somebody else put something there meanwhile.
        """
        await self._threads.run(self._publish)

    async def discard(self) -> None:
        """Remove whatever was built; nothing if nothing was."""
        if self._begun and not self.published and not self._in_place:
            await self._threads.run(self._store.remove_tree, self.temporary)

    def _check(self) -> None:
        kind = self._store.kind(self.final)
        if self._in_place:
            if kind != "directory":
                raise PathError(self.final, "is no directory to save into")
            return

        if kind is not None and not self._overwrite:
            raise DestinationExistsError(self.final)
        if kind is not None and kind != ("directory" if self._file is None else "file"):
            raise PathError(self.final, f"is a {kind}, and no checkpoint to be overwritten")
        if kind is not None and not self._recognises(self.final):
            raise PathError(self.final, f"is a {kind} of something else; only a checkpoint is overwritten")

        self._store.check_writable(self.final)

    def release(self) -> None:
        """Let others build here. Idempotent; to be called when the save is over, well or not."""
        if self._hold is not None:
            self._hold.release()

    def _make_root(self) -> None:
        if not self._is_checked:
            self.check_now()
        if self._in_place:
            self._begun = True
            return

        # Whoever holds what lies there is building a checkpoint in it right now.
        stale = self._store.hold(self.temporary) if self._store.kind(self.temporary) else None
        self._begun = True  # from here on what lies there is ours to remove
        try:
            self._store.remove_tree(self.temporary)
        finally:
            if stale is not None:
                stale.release()

        self._store.make_directory(self.temporary)
        try:
            self._hold = self._store.hold(self.temporary)
        except StorageError as error:
            # Somebody was faster: what lies there now, if anything, is theirs to remove.
            self._begun = error.errno not in {errno.EBUSY, errno.ENOENT}
            raise

    def _publish(self) -> None:
        if self._in_place:
            self.published = True
            return

        built = self.temporary if self._file is None else self.path(self._file)
        replacing = self._store.kind(self.final) is not None
        if replacing and not self._overwrite:
            raise DestinationExistsError(self.final)

        if replacing:
            self._store.exchange(built, self.final)
        else:
            self._store.rename(built, self.final)

        self.published = True
        self._store.sync_directory(os.path.dirname(self.final))
        if replacing or self._file is not None:
            try:
                self._store.remove_tree(self.temporary)
            except StorageError as error:
                self.left_behind = error
