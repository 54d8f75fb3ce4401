"""Locking a directory, so that nobody builds, reads or deletes where another one builds or deletes."""

from __future__ import annotations

__all__ = ("DirectoryHold", "make_held_directory")

import errno
import fcntl
import os
import uuid
from contextlib import suppress
from typing import Final, final

from penstock.handlers.stores.descriptor import translated
from penstock.handlers.stores.name_claims import NameClaim
from penstock.handlers.stores.system_calls.atomic_rename import rename_only_to_absent
from penstock.kernel.concurrency.fork import HomeProcess
from penstock.kernel.errors import InUseError, StorageError

# Some network file systems have no such lock. A file with the holder's name takes its place there.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@final
class DirectoryHold:
    """An flock on a directory. The system releases it when the process ends, even after a crash.

    The hold belongs to the directory, not to its name: it stays with it through a rename. Where the file
    system has no such lock, an exclusive hold is a `NameClaim`, which belongs to the name.

    An exclusive hold keeps a second descriptor, so that the directory can be removed when the process has
    none left.

    Args:
        path: The directory to lock.
        shared: Whether other shared holds may exist at the same time.
        name: The path that it will be renamed to and is claimed by; `path` itself if empty.

    Raises:
        InUseError: If this process or another one already holds the directory, or if the directory was
            replaced meanwhile.
    """

    __slots__ = ("__weakref__", "_claim", "_home", "_number", "_path", "_spare")

    def __init__(self, path: str, *, shared: bool = False, name: str = "") -> None:
        self._home = HomeProcess()
        self._number = self._spare = -1  # in case the directory cannot be opened
        self._claim: NameClaim | None = None
        self._path = path
        with translated("hold", path):
            self._number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        try:
            if not shared:
                with translated("hold", path):
                    self._spare = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

            self._lock(path, name or path, shared)
        except BaseException:
            self.release()
            raise

    def _lock(self, path: str, name: str, shared: bool) -> None:
        try:
            fcntl.flock(self._number, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(path) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise StorageError.of("hold", path, error) from error
            if not shared:
                self._claim = NameClaim(name)
            elif NameClaim.is_made(path):
                raise InUseError(path) from None

        with translated("hold", path):
            is_same = os.path.samestat(os.fstat(self._number), os.stat(path))
        if not is_same:
            raise InUseError(path)

    def give_up_spare(self) -> None:
        """Close the second descriptor, for whoever removes the directory now."""
        spare, self._spare = self._spare, -1
        if spare >= 0:
            with suppress(OSError):  # it has only been opened
                os.close(spare)

    def release(self) -> None:
        """Release the lock. Idempotent.

        Raises:
            StorageError: If the descriptor could not be closed. The lock is released all the same.
        """
        self.give_up_spare()
        number, self._number = self._number, -1
        if number < 0:
            return

        # A forked child shares the lock and must not release it. This process must unlock explicitly,
        # because closing is not enough while a child still has the descriptor open.
        if self._home.is_here:
            with suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)
            if self._claim is not None:
                self._claim.release()

        with translated("release", self._path):
            os.close(number)

    def __del__(self) -> None:
        self.release()


def make_held_directory(path: str) -> DirectoryHold:
    """Create the directory at `path`, in one that exists, held before it is seen. Its name is not synced.

    It is made under a name of its own, held, and then renamed. Where the file system cannot rename to a free
    name alone, it is made first and held then; who finds it in between may take it, and this call is refused.
    If it fails, nothing is left there.

    Raises:
        InUseError: If something lies at `path`, or another one was faster.
    """
    beside = f"{path}-{uuid.uuid4().hex}"
    with translated("mkdir", path):
        os.mkdir(beside)

    hold: DirectoryHold | None = None
    try:
        hold = DirectoryHold(beside, name=path)
        with translated("mkdir", path):
            if rename_only_to_absent(beside, path):
                return hold
    except BaseException as error:
        if hold is not None:
            hold.release()

        os.rmdir(beside)
        if isinstance(error, StorageError) and error.errno == errno.EEXIST:
            raise InUseError(path) from error

        raise

    hold.release()
    os.rmdir(beside)
    return _make_then_hold(path)


def _make_then_hold(path: str) -> DirectoryHold:
    try:
        with translated("mkdir", path):
            os.mkdir(path)

        return DirectoryHold(path)
    except StorageError as error:
        if error.errno in {errno.EEXIST, errno.ENOENT}:  # it was there, or was taken and removed
            raise InUseError(path) from error

        raise
