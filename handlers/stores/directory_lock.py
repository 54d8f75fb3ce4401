"""Holding a directory, so that two saves never build in one place."""

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

# Some network file systems have no such lock. There the user makes sure that one save runs at a time.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@final
class DirectoryHold:
    """An flock on a directory. The system lifts it when the process ends, however it ends.

    Args:
        path: A directory.
        shared: Whether others may share the hold.

    Raises:
        StorageError: With `errno.EBUSY` if another hold is on it, of this process or another, or if
            the directory was replaced meanwhile.
    """

    __slots__ = ("_home", "_number")

    def __init__(self, path: str, *, shared: bool = False) -> None:
        self._home = HomeProcess()
        self._number = -1  # in case it cannot be opened
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
        """Give it up. Idempotent."""
        number, self._number = self._number, -1
        if number < 0:
            return

        # A fork shares the lock. The fork must not lift it; here it must be lifted, because closing is not
        # enough while the fork has the descriptor open.
        if self._home.is_here:
            with suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)

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
