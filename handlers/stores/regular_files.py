"""Regular files: opened only if they are that, read, measured and written whole.

A checkpoint may be hostile. Where it has a pipe, opening it would wait for a writer that never comes; where
it has a device, reading it may never end.
"""

from __future__ import annotations

__all__ = (
    "MOST_DOCUMENT_BYTES",
    "Descriptor",
    "SyncedFiles",
    "create_whole",
    "data_bytes",
    "open_regular",
    "read_whole",
    "replace_whole",
    "transfer",
    "translated",
    "write_vectored",
)

import errno
import os
import stat
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from errno import EIO
from itertools import islice
from typing import Final, final

from penstock.handlers.stores.file_system import rename_to_absent
from penstock.kernel.errors import (
    CorruptCheckpointError,
    NotAFileError,
    PenstockError,
    StorageError,
    UnsupportedFormatError,
)
from penstock.kernel.memory.bounded_cache import BoundedCache

MOST_DOCUMENT_BYTES: Final = 2**30
"""Longer files are not read as a whole. The longest document of a million leaves has a fifth of it."""

_LONG: Final = 2**20
"""From this many bytes on, a document is searched for holes before it is read."""

# The size of a file is only a claim: memory is taken as bytes arrive.
_AT_ONCE: Final = 2**26
_KINDS: Final = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NO_HOLES_KNOWN: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})


def open_regular(path: str) -> tuple[int, int]:
    """Open a file for reading, without waiting if it is a pipe or a device.

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
        status = os.fstat(number)
    except OSError:
        os.close(number)
        raise

    if stat.S_ISREG(status.st_mode):
        return number, status.st_size

    os.close(number)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))

    raise NotAFileError(path, _KINDS.get(stat.S_IFMT(status.st_mode), "something else"))


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
    finally:
        os.close(number)


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


@contextmanager
def translated(operation: str, path: str) -> Generator[None]:
    """Turn an `OSError` raised in the block into a `StorageError` with the same number and message.

    So is a name from a document that no file can have, with a NUL or a surrogate in it.
    """
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        raise StorageError.of(operation, path, error) from error
    except ValueError as error:
        raise StorageError(operation, path, f"is no possible path: {error}", errno.EINVAL) from error


@final
class Descriptor:
    """An open file. Warns if it is collected before it is closed.

    Args:
        path: The file or directory to open.
        flags: Flags for `os.open`, which adds O_CLOEXEC, so that no child process inherits the descriptor.

    Raises:
        StorageError: If it cannot be opened.
    """

    __slots__ = ("number", "path")

    number: int  #: -1 once closed, so that every operation fails with EBADF
    path: str

    def __init__(self, path: str, flags: int) -> None:
        self.number = -1
        self.path = path
        with translated("open", path):
            self.number = os.open(path, flags, 0o666)

    @classmethod
    def of_regular(cls, path: str) -> Descriptor:
        """Open an existing file for reading; see `open_regular`.

        Raises:
            NotAFileError: If it is a pipe, a socket or a device.
            StorageError: If it is a directory, or cannot be opened.
        """
        opened = cls.__new__(cls)
        opened.number = -1
        opened.path = path
        with translated("open", path):
            opened.number, _ = open_regular(path)

        return opened

    def close(self) -> None:
        """Close the file. Idempotent. Must not be called while another thread uses it."""
        number, self.number = self.number, -1
        if number >= 0:
            with translated("close", self.path):
                os.close(number)

    def __del__(self) -> None:
        if self.number >= 0:
            warnings.warn(f"{self.path!r} was not closed", ResourceWarning, stacklevel=1, source=self)
            self.close()


# The errors of a file system without hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def replace_whole(path: str, data: bytes, *, new: bool = False, synced: SyncedFiles | None = None) -> None:
    """Create a file, or replace its content, and make the content durable.

    This is not atomic: after a failure the file may hold any part of the content.

    Args:
        path: Path of the file.
        data: Its whole content.
        new: Whether it is an error if the file exists.
        synced: Called with the file once it is synced.

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
    new = f"{path}.penstock-new-{uuid.uuid4().hex}"
    try:
        replace_whole(new, data, new=True)
        with translated("create", path):
            _link_to_absent(new, path)
    except StorageError as error:
        if error.errno != errno.EEXIST or not _holds(path, data):
            raise

        return False
    finally:
        with suppress(OSError):  # already renamed, or never created
            os.unlink(new)

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


_MOST: Final = 1 << 16
_BYTES_OF_AN_ENTRY: Final = 300


@final
class SyncedFiles:
    """Remembers the last files that were synced, by inode, length and time of change. Thread-safe.

    A file that is written later has another time. A link to it has the same.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: BoundedCache[tuple[int, ...], bool] = BoundedCache(_MOST)

    def note(self, descriptor: int) -> None:
        """Note that an open file was just synced."""
        self._known.put(_key(os.fstat(descriptor)), True, _BYTES_OF_AN_ENTRY)

    def knows(self, descriptor: int) -> bool:
        """True if an open file was synced after its last change."""
        return self._known.get(_key(os.fstat(descriptor))) is not None


def _key(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))  #: buffers per call; 1024 on Linux


def write_vectored(descriptor: int, offset: int, views: Sequence[memoryview]) -> None:
    """Write all views of bytes one after another, beginning at `offset`.

    Raises:
        OSError: As `os.pwritev` does. Any number of bytes may have been written before.
    """
    if transfer(os.pwritev, descriptor, offset, views) < offset + sum(map(len, views)):
        raise OSError(EIO, "the system wrote nothing and reported no error")


def transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    offset: int,
    views: Sequence[memoryview],
) -> int:
    """Fill or write all views one after another, beginning at `offset`.

    Args:
        call: `os.preadv` or `os.pwritev`.
        descriptor: Of an open file.
        offset: In bytes.
        views: Of bytes, one-dimensional.

    Returns:
        The offset reached: the end of the last view's range, or less if a file that is read ends before.

    Raises:
        OSError: As the call does. Any number of bytes may have been moved before.
    """
    # A Linux call transfers at most 2 GiB - 4 KiB, and any call may transfer less than it was asked to.
    pending = deque(views)
    while pending:
        moved = call(descriptor, list(islice(pending, MAX_BUFFERS)), offset)
        if moved == 0:
            break

        offset += moved
        while pending and moved >= len(pending[0]):
            moved -= len(pending.popleft())
        if moved:
            pending[0] = pending[0][moved:]

    return offset
