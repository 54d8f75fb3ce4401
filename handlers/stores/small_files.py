"""Reading or measuring thousands of small files, with little cost beyond the system calls."""

from __future__ import annotations

__all__ = ("data_sizes", "file_sizes", "read_files")

import os
import stat
from collections.abc import Iterable

from penstock.handlers.stores.regular_files import data_bytes, open_regular, read_whole
from penstock.kernel.errors import PenstockError, StorageError


def read_files(paths: Iterable[str]) -> list[bytes | None]:
    """Return the content of each file; None for a missing one, a directory, or a name no file can have.

    Raises:
        NotAFileError: If one is a pipe, a socket or a device.
        CorruptCheckpointError: If one is too long for a document, or most of it is a hole.
        StorageError: If one cannot be read.
    """
    found: list[bytes | None] = []
    for path in paths:
        try:
            data = read_whole(path)
        except PenstockError:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            found.append(None)
        except OSError as error:
            raise StorageError.of("read", path, error) from error
        else:
            found.append(data)

    return found


def file_sizes(paths: Iterable[str]) -> list[int | None]:
    """Return the size of each file in bytes; -1 for a directory or a device, None where there is nothing.

    Raises:
        StorageError: If the status of one cannot be read.
    """
    found: list[int | None] = []
    for path in paths:
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            found.append(None)
        except OSError as error:
            raise StorageError.of("stat", path, error) from error
        else:
            found.append(status.st_size if stat.S_ISREG(status.st_mode) else -1)

    return found


def data_sizes(paths: Iterable[str]) -> list[int]:
    """Return the bytes of each file outside of its holes; 0 for what is no file, or a name no file can have.

    Raises:
        StorageError: If one cannot be looked at.
    """
    found: list[int] = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append(_data_bytes(path, status) if stat.S_ISREG(status.st_mode) else 0)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            found.append(0)
        except OSError as error:
            raise StorageError.of("stat", path, error) from error

    return found


def _data_bytes(path: str, status: os.stat_result) -> int:
    if status.st_blocks * 512 >= status.st_size:
        return status.st_size  # no holes, or few

    number, nbytes = open_regular(path)
    try:
        return data_bytes(number, nbytes)
    finally:
        os.close(number)
