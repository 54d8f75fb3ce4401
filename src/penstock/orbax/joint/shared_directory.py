"""A directory that several processes fill, and that one of them completes."""

from __future__ import annotations

__all__ = ("SharedDirectory",)

import errno
import os
from typing import Any, Final, final

from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import StorageError
from penstock.orbax.common.handler_paths import handler_path
from penstock.orbax.common.item_files import mark_complete

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
