"""Opening files for reading, if they are files at all.

A checkpoint may be hostile. Where it has a pipe, opening it would wait for a writer that never comes; where
it has a device, reading it may never end.
"""

from __future__ import annotations

__all__ = ("MOST_DOCUMENT_BYTES", "data_bytes", "open_regular", "read_whole")

import errno
import os
import stat
from typing import Final

from penstock.kernel.errors import CorruptCheckpointError, NotAFileError, UnsupportedFormatError

MOST_DOCUMENT_BYTES: Final = 2**30
"""Longer files are not read as a whole. The longest document of a million leaves has a fifth of it."""

_LONG: Final = 2**20
"""From this many bytes on, a document is searched for holes before it is read."""

_AT_ONCE: Final = 2**26
_KINDS: Final = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NO_HOLES_KNOWN: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})


def open_regular(path: str) -> tuple[int, int]:
    """Open a file for reading, without ever waiting for what lies there.

    Returns:
        The descriptor, which no child process inherits, and the length of the file in bytes.

    Raises:
        NotAFileError: If it is a pipe, a socket or a device.
        OSError: If it is a directory, or cannot be opened.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in {errno.ENXIO, errno.ENODEV}:  # a socket, or a device without a driver
            raise NotAFileError(path, "a socket or a device") from error

        raise

    try:
        return number, _size_of_regular(path, number)
    except BaseException:
        os.close(number)
        raise


def _size_of_regular(path: str, number: int) -> int:
    status = os.fstat(number)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError(path, _KINDS.get(stat.S_IFMT(status.st_mode), "something else"))

    return status.st_size


def read_whole(path: str) -> bytes:
    """Return the content of a file: a document, which is held in memory.

    Raises:
        NotAFileError: If it is a pipe, a socket or a device.
        UnsupportedFormatError: If it has more than `MOST_DOCUMENT_BYTES`.
        CorruptCheckpointError: If most of it is a hole: a few bytes on the disk that read as any number of
            zeros. No document has one.
        OSError: If it is a directory, or cannot be read.
    """
    number, nbytes = open_regular(path)
    try:
        if nbytes > MOST_DOCUMENT_BYTES:
            problem = f"has {nbytes} bytes; penstock reads documents of up to {MOST_DOCUMENT_BYTES}"
            raise UnsupportedFormatError(path, problem)
        if nbytes >= _LONG and 2 * data_bytes(number, nbytes) < nbytes:
            raise CorruptCheckpointError(path, f"has {nbytes} bytes, and most of them are a hole")

        return _read(number, nbytes)
    finally:
        os.close(number)


def _read(number: int, nbytes: int) -> bytes:
    # A byte more than there is, so that a short read shows the end.
    data = os.read(number, min(nbytes + 1, _AT_ONCE))
    if len(data) == nbytes:
        return data

    parts = [data]
    left = MOST_DOCUMENT_BYTES - len(data)
    while parts[-1] and left > 0:
        parts.append(os.read(number, min(left, _AT_ONCE)))
        left -= len(parts[-1])

    return b"".join(parts)


def data_bytes(number: int, nbytes: int) -> int:
    """Return how many bytes of an open file take room on the disk: those outside of holes.

    All of them, where the file system cannot tell. The file's position changes.

    Args:
        number: The descriptor.
        nbytes: The length of the file.
    """
    found = at = 0
    try:
        while at < nbytes:
            start = os.lseek(number, at, os.SEEK_DATA)
            at = min(os.lseek(number, start, os.SEEK_HOLE), nbytes)
            found += at - start
    except OSError as error:
        if error.errno in _NO_HOLES_KNOWN:
            return nbytes
        if error.errno != errno.ENXIO:  # no data behind this place
            raise
    finally:
        os.lseek(number, 0, os.SEEK_SET)

    return found
