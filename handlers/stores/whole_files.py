"""Writing whole files in one call: replacing them, or creating them exactly once among many writers."""

from __future__ import annotations

__all__ = ("create_whole", "replace_whole")

import errno
import os
import uuid
from contextlib import suppress
from typing import Final

from penstock.handlers.stores.descriptor import Descriptor, translated
from penstock.handlers.stores.regular_files import read_whole
from penstock.handlers.stores.synced_files import SyncedFiles
from penstock.handlers.stores.system_calls.atomic_rename import rename_to_absent
from penstock.handlers.stores.system_calls.vectored_io import write_vectored
from penstock.kernel.errors import PenstockError, StorageError

# The errors of a file system without hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def replace_whole(path: str, data: bytes, *, new: bool = False, synced: SyncedFiles | None = None) -> None:
    """Create a file, or replace its content, and make the content durable.

    This is not atomic: after a failure the file may hold any part of the content.

    Args:
        path: Path of the file.
        data: Its whole content.
        new: Whether it is an error if the file exists.
        synced: Told of the file once it is synced.

    Raises:
        StorageError: If the medium refuses.
    """
    file = Descriptor(path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC))
    try:
        with translated("write", path):
            write_vectored(file.number, 0, [memoryview(data)])
        with translated("fsync", path):
            os.fsync(file.number)
            if synced is not None:
                synced.note(file.number)
    finally:
        file.close()


def create_whole(path: str, data: bytes) -> bool:
    """Create a file with its content in one step. The content is durable, its directory entry is not.

    It is written as `<path>.penstock-new-<hex>` and then linked to `path`, so that only one of several
    writers succeeds and readers never see a part. A crash may leave the `penstock-new` file behind.

    Returns:
        True if the file was created; False if it existed with this content.

    Raises:
        StorageError: With `errno.EEXIST` if it existed with other content.
    """
    beside = f"{path}.penstock-new-{uuid.uuid4().hex}"
    try:
        replace_whole(beside, data, new=True)
        with translated("create", path):
            _link_to_absent(beside, path)
    except StorageError as error:
        if error.errno != errno.EEXIST or not _holds(path, data):
            raise

        return False
    finally:
        with suppress(OSError):  # already renamed, or never created
            os.unlink(beside)

    return True


def _link_to_absent(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise

        rename_to_absent(source, destination)


def _holds(path: str, data: bytes) -> bool:
    try:
        with translated("read", path):
            return read_whole(path) == data
    except PenstockError:
        return False
