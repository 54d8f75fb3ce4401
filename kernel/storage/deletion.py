"""Deleting a checkpoint so that no reader finds half of it."""

from __future__ import annotations

__all__ = ("delete_checkpoint", "move_checkpoint")

import os
from collections.abc import Callable

from penstock.kernel.errors import UnsupportedByStoreError
from penstock.kernel.protocols.store_capabilities import Renames
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.holds import hold_alone


def delete_checkpoint(store: Store, path: str, hidden: str) -> None:
    """Remove the checkpoint at `path`; the first step already makes it invisible. Blocking.

    On a store with renames it is first renamed to a name that no reader takes for a checkpoint, and a crash
    leaves it there. On any other store `remove_tree` first removes what makes it a checkpoint.

    Args:
        store: Where it lies.
        path: Of the checkpoint.
        hidden: The name to hide it under. Anything already there is left from an earlier deletion.

    Raises:
        StorageError: With `errno.EBUSY` if it is being read or built, or if the medium refuses.
    """
    if isinstance(store, Renames):
        _hide(store, store.rename, path, hidden)
        store.remove_tree(hidden)
        return

    held = hold_alone(store, path)
    try:
        store.remove_tree(path)
    finally:
        held.release()

    store.sync_directory(os.path.dirname(path))


def move_checkpoint(store: Store, path: str, destination: str) -> None:
    """Move the checkpoint at `path`, in one step, over whatever lies at `destination`. Blocking.

    Raises:
        UnsupportedByStoreError: If the store cannot rename.
        StorageError: With `errno.EBUSY` if it is being read or built, or if the medium refuses.
    """
    if not isinstance(store, Renames):
        raise UnsupportedByStoreError("move", path, store, Renames)

    store.make_directory(os.path.dirname(destination))
    _hide(store, store.rename, path, destination)
    store.sync_directory(os.path.dirname(destination))


def _hide(store: Store, rename: Callable[[str, str], None], path: str, hidden: str) -> None:
    # Readers hold it as long as they read; the rename hides it from later ones.
    held = hold_alone(store, path)
    try:
        store.remove_tree(hidden)
        rename(path, hidden)
    finally:
        held.release()

    store.sync_directory(os.path.dirname(path))
