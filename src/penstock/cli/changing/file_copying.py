"""Copies the files of a checkpoint on a disk, and publishes the copy in one step."""

from __future__ import annotations

__all__ = ("copy_checkpoint",)

import os
import shutil
from collections.abc import Callable
from typing import Final

from penstock.handlers.formats.orbax.file_names import temporary_path
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import DestinationExistsError, NotAFileError, StorageError
from penstock.kernel.storage.deletion import remove_abandoned

_BLOCK: Final = 2**24


def copy_checkpoint(source: str, destination: str, on_progress: Callable[[int], object]) -> int:
    """Copy the file or directory at `source` to `destination`, which must be free. Blocking.

    Args:
        source: A finished checkpoint. It is held meanwhile, so that nobody deletes it.
        destination: Where it goes; directories above it are made.
        on_progress: Called with the bytes copied so far.

    Returns:
        The bytes copied.

    Raises:
        DestinationExistsError: If something is at the destination.
        InUseError: If the source is being deleted, or another copy is being made there.
        NotAFileError: If there is something in it that cannot be copied.
        StorageError: If the medium refuses; nothing is left then.
    """
    store = LocalStore()
    if os.path.lexists(destination):
        raise DestinationExistsError(destination)

    held = store.hold_reading(source) if os.path.isdir(source) else None
    parent, beside = os.path.dirname(destination), temporary_path(destination)
    try:
        store.make_directory(parent)
        remove_abandoned(store, beside)
        token = store.begin_build(destination, beside, os.path.basename(destination))
        building = store.make_held(token.place)
        try:
            nbytes = _copy(source, token.built, on_progress)
            store.sync_tree(token.place)
            store.publish(token)
            store.sync_directory(parent)
        finally:
            try:
                store.discard(token)
            finally:
                building.release()
    except OSError as error:
        if isinstance(error, StorageError):
            raise

        raise StorageError.of("copy", error.filename or source, error) from error
    finally:
        if held is not None:
            held.release()

    return nbytes


def _copy(source: str, destination: str, on_progress: Callable[[int], object]) -> int:
    """Copy files, links as links, and times."""
    if not os.path.isdir(source):
        done = _copy_file(source, destination, 0, on_progress)
        shutil.copystat(source, destination)
        return done

    done = 0
    os.mkdir(destination)
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        target = os.path.join(destination, entry.name)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        elif entry.is_dir():
            done += _copy(entry.path, target, _after(done, on_progress))
        elif not entry.is_file():
            raise NotAFileError(entry.path, "a pipe, a socket or a device")
        else:
            done += _copy_file(entry.path, target, done, on_progress)
            shutil.copystat(entry.path, target)

    shutil.copystat(source, destination)
    return done


def _after(before: int, on_progress: Callable[[int], object]) -> Callable[[int], object]:
    """Return what reports bytes that come after some others."""
    return lambda done: on_progress(before + done)


def _copy_file(source: str, destination: str, before: int, on_progress: Callable[[int], object]) -> int:
    done = 0
    with open(source, "rb") as reading, open(destination, "xb") as writing:
        while block := reading.read(_BLOCK):
            writing.write(block)
            done += len(block)
            on_progress(before + done)

    return done
