"""Deletes a checkpoint so that no reader finds half of it, and only if no one else holds it."""

from __future__ import annotations

__all__ = ("delete_checkpoint", "delete_file", "hold_abandoned", "move_checkpoint", "remove_abandoned")

import errno
import os
import time
import uuid
from collections.abc import Callable
from typing import Final

from penstock.kernel.errors import InUseError, StorageError, UnsupportedByStoreError
from penstock.kernel.protocols.stores import Directories, Hold, Store

_LOOK_S: Final = 0.002
"""A reader that looks whether somebody is at work in a directory holds it no longer."""

_NOT_OURS: Final = frozenset({errno.EACCES, errno.EPERM})


def delete_checkpoint(
    store: Store, path: str, hidden: str, *, is_wanted: Callable[[], bool] = lambda: True
) -> StorageError | None:
    """Remove the checkpoint at `path`; the first step already makes it invisible. Blocking.

    On a store with renames it is first renamed to a name that no reader takes for a checkpoint. On any other
    store `remove_tree` first removes what makes it a checkpoint. It is held until it is removed.

    Args:
        store: Where it is.
        path: Of the checkpoint.
        hidden: The name to hide it under. Anything already there is left from an earlier deletion.
        is_wanted: Asked once it is held, before the first step; if it says no, nothing is done.

    Returns:
        Why something of it was left under the hidden name; None if all of it is gone, or it is not wanted.

    Raises:
        InUseError: If it is being read or built.
        StorageError: If the medium refuses. The checkpoint is still there.
    """
    if (directories := store.directories) is None:  # the first step of its removal makes it invisible
        return _remove_in_place(store, path, is_wanted)

    remove_abandoned(store, hidden, set_aside=True)
    held = store.hold(path)
    try:
        if not is_wanted():
            return None

        directories.rename(path, hidden)
        try:
            store.sync_directory(os.path.dirname(path))
            store.remove_tree(hidden)
        except StorageError as error:
            return error
    finally:
        held.release()

    return None


def delete_file(store: Store, path: str, hidden: str) -> None:
    """Remove the checkpoint at `path` that is one file. Blocking.

    A file cannot be held. So the directory is held in which a save to `path` builds: while one goes on,
    nothing is deleted, and none begins until the file is gone.

    Args:
        store: Where it is.
        path: Of the file.
        hidden: The directory in which a save to `path` builds. On a store with renames the file is moved
            there, and removed with it.

    Raises:
        InUseError: If a save to `path` goes on.
        StorageError: If the medium refuses. If the file is gone nevertheless, that may not be durable, and
            the next save removes the rest.
    """
    if (directories := store.directories) is None:
        store.remove_tree(path)
        return

    remove_abandoned(store, hidden, set_aside=True)
    held = directories.make_held(hidden)
    try:
        try:
            directories.rename(path, os.path.join(hidden, os.path.basename(path)))
        except StorageError:
            store.remove_tree(hidden)
            raise

        store.sync_directory(os.path.dirname(path))  # or its bytes could be lost, and its name come back
        store.remove_tree(hidden)
    finally:
        held.release()


def move_checkpoint(
    store: Store, path: str, destination: str, *, is_wanted: Callable[[], bool] = lambda: True
) -> StorageError | None:
    """Move the checkpoint at `path`, in one step, over whatever is at `destination`. Blocking.

    Args:
        store: Where it is.
        path: Of the checkpoint.
        destination: Its new path.
        is_wanted: Asked once it is held, before it is moved; if it says no, it is not.

    Returns:
        Why the move may not be durable; None if it is, or it is not wanted.

    Raises:
        UnsupportedByStoreError: If the store cannot rename.
        InUseError: If it is being read or built, or what is at `destination` is.
        StorageError: If the medium refuses. The checkpoint is still there.
    """
    if (directories := store.directories) is None:
        raise UnsupportedByStoreError("move", path, store, Directories)

    store.make_directory(os.path.dirname(destination))
    if store.kind(destination) is not None:  # an earlier one, which a crash must not leave there in part
        delete_checkpoint(store, destination, f"{destination}.penstock-replaced")

    held = store.hold(path)
    try:
        if not is_wanted():
            return None

        directories.rename(path, destination)
    finally:
        held.release()

    try:
        store.sync_directory(os.path.dirname(path))
        store.sync_directory(os.path.dirname(destination))
    except StorageError as error:
        return error

    return None


def remove_abandoned(store: Store, path: str, *, set_aside: bool = False) -> StorageError | None:
    """Remove what an interrupted save or deletion left at `path`, if anything is there. Blocking.

    That may be a checkpoint that was replaced, by a save that ended before the name of the new one was
    durable. So the names in the directory are made durable first.

    Args:
        store: Where it is.
        path: Of a build, or of what a deletion has hidden.
        set_aside: Whether what may not be removed, as it is another user's, is renamed to `<path>-<hex>`: in
            a directory of ours that is allowed, and who may remove it finds it by that name.

    Returns:
        Why something was left, under the other name; None if nothing was.

    Raises:
        InUseError: If somebody is at work there: then it is not abandoned.
        StorageError: If the medium refuses.
    """
    if store.kind(path) is None:
        return None

    store.sync_directory(os.path.dirname(path))
    try:
        held = hold_abandoned(store, path)
    except StorageError as error:
        if error.errno == errno.ENOENT:  # who was at work there has removed it
            return None

        raise

    try:
        store.remove_tree(path)
    except StorageError as error:
        directories = store.directories
        if not set_aside or error.errno not in _NOT_OURS or directories is None:
            raise

        aside = f"{path}-{uuid.uuid4().hex}"
        directories.rename(path, aside)
        return StorageError("remove", aside, error.problem, error.errno)
    finally:
        held.release()

    return None


def hold_abandoned(store: Store, path: str) -> Hold:
    """Hold what an interrupted save left at `path`. Blocking.

    Raises:
        InUseError: If somebody is at work there.
        StorageError: If the medium refuses.
    """
    try:
        return store.hold(path)
    except InUseError:
        time.sleep(_LOOK_S)  # a reader may only be looking whether it is abandoned
        return store.hold(path)


def _remove_in_place(store: Store, path: str, is_wanted: Callable[[], bool]) -> StorageError | None:
    held = store.hold(path)
    try:
        if not is_wanted():
            return None

        store.remove_tree(path)
    finally:
        held.release()

    try:
        store.sync_directory(os.path.dirname(path))
    except StorageError as error:  # it is gone all the same
        return error

    return None
