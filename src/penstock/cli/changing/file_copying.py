"""Copies the files of a checkpoint on a disk, and publishes the copy in one step."""

from __future__ import annotations

__all__ = ("copy_checkpoint",)

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Final

from anyio import move_on_after
from anyio.from_thread import check_cancelled

from penstock.handlers.formats.orbax.file_names import temporary_path
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import DestinationExistsError, NotAFileError, StorageError
from penstock.kernel.protocols.store_capabilities import Hold
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.holds import NoHold, hold_with_readers
from penstock.kernel.storage.reading import Reading, read_unchanged
from penstock.kernel.storage.workspace import Workspace

_BLOCK: Final = 2**24
_CLEANING_S: Final = 60.0


async def copy_checkpoint(source: str, destination: str, on_progress: Callable[[int], object]) -> int:
    """Copy the file or directory at `source` to `destination`, which must be free.

    Args:
        source: A finished checkpoint. It is held meanwhile, so that nobody deletes it. If it is replaced
            meanwhile, what was copied is thrown away, and the new one is copied.
        destination: Where it goes; directories above it are made.
        on_progress: Called with the bytes copied so far, in a worker thread.

    Returns:
        The bytes copied.

    Raises:
        DestinationExistsError: If something is at the destination.
        InUseError: If the source is being deleted, or another copy is being made there.
        NotAFileError: If there is something in it that cannot be copied.
        NotDurableError: If the copy is there, and its name may not be durable.
        ReplacedError: If it was replaced again and again while it was copied.
        StorageError: If the medium refuses; nothing is left then.

    Cancellation:
        Nothing is left at the destination.
    """
    threads = Threads()
    await threads.run(_check_free, destination)
    copying = partial(_copy_and_publish, threads, source, destination, on_progress)
    return await read_unchanged(LocalStore(), threads, source, copying, _hold)


def _check_free(destination: str) -> None:
    if os.path.lexists(destination):
        raise DestinationExistsError(destination)


def _hold(store: Store, path: str) -> Hold:
    return hold_with_readers(store, path) if os.path.isdir(path) else NoHold()


async def _copy_and_publish(
    threads: Threads, path: str, destination: str, on_progress: Callable[[int], object], source: Reading
) -> int:
    store, name = LocalStore(), os.path.basename(destination)
    workspace = Workspace(
        store, threads, destination, temporary_path(destination), overwrite=False, file=name
    )
    try:
        await workspace.open()
        nbytes = await threads.run(_copy_durably, store, path, workspace.path(name), on_progress)
        await source.end()
        await workspace.publish()
    except BaseException:
        with move_on_after(_CLEANING_S, shield=True):
            await workspace.discard()

        raise
    finally:
        workspace.release()

    return nbytes


def _copy_durably(store: LocalStore, path: str, built: str, on_progress: Callable[[int], object]) -> int:
    try:
        nbytes = _copy(path, built, on_progress)
    except OSError as error:
        if isinstance(error, StorageError):
            raise

        raise StorageError.of("copy", error.filename or path, error) from error

    store.sync_tree(os.path.dirname(built))
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
            check_cancelled()
            writing.write(block)
            done += len(block)
            on_progress(before + done)

    return done
