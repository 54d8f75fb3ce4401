"""The directory that a checkpoint is built in, for handlers that write files by themselves."""

from __future__ import annotations

__all__ = ("SharedDirectory", "TemporaryDirectory")

import errno
import os
from typing import Any, Final, final

from penstock.handlers.formats.common.temporary_names import TEMPORARY_SUFFIX
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import DestinationExistsError, StorageError
from penstock.kernel.events import get_logger
from penstock.kernel.protocols.store_capabilities import Hold
from penstock.kernel.storage.deletion import remove_abandoned
from penstock.kernel.storage.workspace import Workspace
from penstock.orbax.item_files import handler_path, mark_complete
from penstock.orbax.options import AtomicityMode, AtomicityOptions, FileOptions
from penstock.orbax.step_links import StepLinks


@final
class TemporaryDirectory:
    """One directory on its way to its own name: created, filled by handlers, marked complete, published.

    Every method blocks.

    Args:
        store: Where the checkpoint will lie.
        final: Its own absolute path.
        overwrite: Whether what lies there may be replaced. That happens in one step, at the end.
        atomicity: Whether it is built beside its place or in it.
        files: Its permissions.
        whole: Whether it is a checkpoint; else it is an item of one.
        links: Told when everything is written, before it is published.
    """

    def __init__(
        self,
        store: LocalStore,
        final: str,
        *,
        overwrite: bool = False,
        atomicity: AtomicityOptions | None = None,
        files: FileOptions | None = None,
        whole: bool = True,
        links: StepLinks | None = None,
    ) -> None:
        self._store = store
        self._final = final
        self._overwrite = overwrite
        self._whole = whole
        self._in_place = atomicity is not None and atomicity.mode is AtomicityMode.COMMIT_FILE
        self._mode = None if files is None else files.path_permission_mode
        temporary = final if self._in_place else final + TEMPORARY_SUFFIX
        self._workspace = Workspace(store, Threads(1), final, temporary, overwrite=overwrite)
        self._links = links
        self._hold: Hold | None = None  # in place alone: elsewhere the workspace holds

    def __repr__(self) -> str:
        return f"TemporaryDirectory({self._workspace.temporary!r})"

    def get(self) -> Any:
        """Return the path that it is built under."""
        return handler_path(self._workspace.temporary)

    def get_final(self) -> Any:
        """Return its own path."""
        return handler_path(self._final)

    def check(self) -> None:
        """Make sure that it can be published.

        Raises:
            DestinationExistsError: If something lies there that may not be replaced.
            StorageError: If it could not be created.
        """
        if not self._in_place:
            self._workspace.check_now()
        elif self._store.kind(self._final) is not None and not self._overwrite:
            raise DestinationExistsError(self._final)

    def create(self) -> None:
        """Create it, empty. What an interrupted save left there is removed.

        Raises:
            StorageError: If somebody is building there right now, or the medium refuses.
        """
        if self._in_place:
            self._create_in_place()
        else:
            self._workspace.open_now()
        if self._mode is not None:
            os.chmod(self._workspace.temporary, self._mode)

    def publish(self, *, synced: bool) -> None:
        """Mark it complete and make it visible under its own name, durably.

        Args:
            synced: Whether all files in it are on the medium already.

        Raises:
            DestinationExistsError: If somebody else put something there meanwhile.
        """
        place = self._workspace.temporary
        if synced:
            self._store.sync_directory(place)
        else:
            self._store.sync_tree(place)

        mark_complete(self._store, place, whole=self._whole)
        if self._links is not None:
            self._links.complete()
        if self._in_place:
            self._store.sync_directory(os.path.dirname(place))
        else:
            self._workspace.publish_now()
            if self._workspace.left_behind is not None:  # the new one is there, and durable
                error = repr(self._workspace.left_behind)
                get_logger().warning("save.left_behind", path=place, error=error)

        self.release()

    def discard(self) -> None:
        """Remove it and what is in it."""
        if not self._in_place:
            self._workspace.discard_now()
        elif self._hold is not None:
            self._store.remove_tree(self._final)

        self.release()

    def release(self) -> None:
        """Let others build there. Idempotent."""
        self._workspace.release()
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    def _create_in_place(self) -> None:
        remove_abandoned(self._store, self._final)
        self._hold = self._store.make_held(self._final)


_ATTEMPTS: Final = 10
"""How often a directory is walked again because files of others vanished from it."""


@final
class SharedDirectory:
    """What a `TemporaryDirectory` is to one process, for several: it has its own name from the beginning.

    It lies in a place that is published as a whole, so nothing is renamed, held or removed here.
    Every method blocks.

    Args:
        store: Where the checkpoint will lie.
        path: Of the directory.
        whole: Whether it is a checkpoint; else it is an item of one.
    """

    def __init__(self, store: LocalStore, path: str, *, whole: bool = True) -> None:
        self._store = store
        self._path = path
        self._whole = whole

    def __repr__(self) -> str:
        return f"SharedDirectory({self._path!r})"

    def get(self) -> Any:
        """Return its path."""
        return handler_path(self._path)

    def create(self) -> None:
        """Create it, unless another process has.

        Raises:
            StorageError: If the place it lies in is gone, because the save was ended.
        """
        above = os.path.dirname(self._path)
        if self._store.kind(above) is None:  # one that slept must not bring back what was removed
            raise StorageError("mkdir", self._path, "the save was ended", errno.ENOENT)

        self._store.make_directory(self._path)

    def sync(self) -> None:
        """Make durable what this process wrote, and perhaps more."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._store.sync_tree(self._path)
            except StorageError as error:
                if error.errno != errno.ENOENT or not left:  # otherwise another process renamed its file
                    raise
            else:
                return

    def publish(self, *, synced: bool) -> None:
        """Mark it complete, durably, once all processes have written. The primary's.

        Args:
            synced: Whether all files in it are on the medium already.
        """
        if synced:
            self._store.sync_directory(self._path)
        else:
            self._store.sync_tree(self._path)

        mark_complete(self._store, self._path, whole=self._whole)

    def discard(self) -> None:
        """Leave it to whoever removes the place."""

    def release(self) -> None:
        """Hold nothing, so release nothing."""
