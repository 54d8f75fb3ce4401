"""Locking a directory, so that two saves never build in the same place."""

from __future__ import annotations

__all__ = ("DirectoryHold",)

import errno
import fcntl
import os
from contextlib import suppress
from typing import Final, final

from penstock.handlers.stores.descriptor import translated
from penstock.kernel.concurrency.fork import HomeProcess
from penstock.kernel.errors import StorageError

# Some network file systems have no such lock. There the user must make sure that one save runs at a time.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@final
class DirectoryHold:
    """An flock on a directory. The system releases it when the process ends, even after a crash.

    Args:
        path: The directory to lock.
        shared: Whether other shared holds may exist at the same time.

    Raises:
        StorageError: With `errno.EBUSY` if this process or another one already holds the directory, or if
            the directory was replaced meanwhile.
    """

    __slots__ = ("_home", "_number", "_path")

    def __init__(self, path: str, *, shared: bool = False) -> None:
        self._home = HomeProcess()
        self._path = path
        self._number = -1  # in case the directory cannot be opened
        with translated("hold", path):
            self._number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        try:
            self._lock(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        except BaseException:
            self.release()
            raise

    def _lock(self, path: str, way: int) -> None:
        try:
            fcntl.flock(self._number, way | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(path) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise StorageError.of("hold", path, error) from error

        with translated("hold", path):
            is_same = os.path.samestat(os.fstat(self._number), os.stat(path))
        if not is_same:
            raise _busy(path)

    def release(self) -> None:
        """Release the lock. Idempotent.

        Raises:
            StorageError: If the descriptor could not be closed. The lock is released all the same.
        """
        number, self._number = self._number, -1
        if number < 0:
            return

        # A forked child shares the lock and must not release it. This process must unlock explicitly,
        # because closing is not enough while a child still has the descriptor open.
        if self._home.is_here:
            with suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)

        with translated("release", self._path):
            os.close(number)

    def __del__(self) -> None:
        self.release()


def _busy(path: str) -> StorageError:
    return StorageError(
        "hold",
        path,
        "somebody builds, reads or deletes a checkpoint here",
        errno.EBUSY,
    )
