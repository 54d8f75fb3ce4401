"""Locking a directory, so that nobody builds, reads or deletes where another one builds or deletes."""

from __future__ import annotations

__all__ = ("DirectoryHold", "DirectoryHolds", "Flock", "first_name", "system_flock")

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias, final
from weakref import WeakValueDictionary

from penstock.handlers.stores.descriptor import translated
from penstock.handlers.stores.name_claims import check_name_is_free, claim_name
from penstock.handlers.stores.system_calls.atomic_rename import rename_only_to_absent
from penstock.handlers.stores.system_calls.tree_removal import remove_tree
from penstock.kernel.concurrency.fork import HomeProcess
from penstock.kernel.errors import InUseError, StorageError
from penstock.kernel.storage.claims import Claim

Flock: TypeAlias = Callable[[int, int], object]
"""`fcntl.flock`, or what takes its place in a test."""
system_flock: Final[Flock] = fcntl.flock

# Some network file systems have no such lock. A file with the holder's name takes its place there.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})

_NOT_HELD: Final = "-new"
"""Behind the name of a directory that is made and not held yet."""

_BUILT: Final = ".orbax-checkpoint-tmp"
"""In the names of what is being built."""


@final
class DirectoryHold:
    """An flock on a directory. The system releases it when the process ends, even after a crash.

    The hold belongs to the directory, not to its name: it stays with it through a rename. Where the file
    system has no such lock, an exclusive hold is a claim, which belongs to the name.

    An exclusive hold keeps a second descriptor, so that the directory can be removed when the process has
    none left.

    Args:
        path: The directory to lock.
        shared: Whether other shared holds may exist at the same time.
        name: The path that it will be renamed to and is claimed by; `path` itself if empty.
        flock: The system's call.

    Raises:
        InUseError: If this process or another one already holds the directory, or if the directory was
            replaced meanwhile.
    """

    __slots__ = ("__weakref__", "_claim", "_home", "_number", "_path", "_spare")

    def __init__(
        self, path: str, *, shared: bool = False, name: str = "", flock: Flock = system_flock
    ) -> None:
        self._home = HomeProcess()
        self._number = self._spare = -1  # in case the directory cannot be opened
        self._claim: Claim | None = None
        self._path = path
        with translated("hold", path):
            self._number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        try:
            if not shared:
                with translated("hold", path):
                    self._spare = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

            self._lock(path, name or path, shared, flock)
        except BaseException:
            self.release()
            raise

    def _lock(self, path: str, name: str, shared: bool, flock: Flock) -> None:
        try:
            flock(self._number, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(path) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise StorageError.of("hold", path, error) from error
            if shared:
                check_name_is_free(path)
            else:
                self._claim = claim_name(name)

        with translated("hold", path):
            is_same = os.path.samestat(os.fstat(self._number), os.stat(path))
        if not is_same:
            raise InUseError(path)

    def lies_at(self, path: str) -> bool:
        """Whether `path` is the directory that is held; so it counts once it is not held any more."""
        if self._number < 0:
            return True

        with translated("stat", path), suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._number), os.stat(path))

        return False

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


@final
class DirectoryHolds:
    """Takes the holds of one store, and knows those on whole directories by their paths.

    Args:
        flock: The system's call.
    """

    __slots__ = ("_alone", "_flock")

    def __init__(self, flock: Flock) -> None:
        self._flock = flock
        self._alone: WeakValueDictionary[str, DirectoryHold] = WeakValueDictionary()

    def take(self, path: str) -> DirectoryHold:
        """Hold the directory at `path` exclusively.

        Raises:
            InUseError: If anybody holds it.
        """
        hold = self._alone[path] = DirectoryHold(path, flock=self._flock)
        return hold

    def take_shared(self, path: str) -> DirectoryHold:
        """Hold the directory at `path` together with others who do.

        Raises:
            InUseError: If it is held exclusively.
        """
        return DirectoryHold(path, shared=True, flock=self._flock)

    def make(self, path: str) -> DirectoryHold:
        """Create the directory at `path`, in one that exists, held before it is seen. Its name is not synced.

        If it fails, nothing is left there.

        Raises:
            InUseError: If something lies at `path`, or another one was faster.
        """
        hold = self._alone[path] = _make_held(path, self._flock)
        return hold

    def lies_at(self, path: str) -> bool:
        """Whether the directory that is held under `path` lies there still, if there is one."""
        hold = self._alone.get(path)
        return hold is None or hold.lies_at(path)

    def give_up_spare(self, path: str) -> None:
        """Close the descriptor that the hold on `path` keeps for its removal, if there is one."""
        hold = self._alone.get(path)
        if hold is not None:
            hold.give_up_spare()


def first_name(path: str) -> str:
    """Return the name under which a directory lies until it is held and has the name `path`."""
    return path + _NOT_HELD


def _make_held(path: str, flock: Flock) -> DirectoryHold:
    """Make it under another name, hold it, and then rename it.

    Every process uses the same other name. So the next one finds what one left that was killed, and uses it;
    of several who are as far, one can hold it, and the others are refused.

    Where the file system cannot rename to a free name alone, it is made first and held then; who finds it in
    between may take it, and this call is refused.
    """
    beside = first_name(path)
    hold = _hold_beside(beside, path, flock)
    is_ours = False
    try:
        with translated("mkdir", path):
            is_ours = rename_only_to_absent(beside, path)
    except StorageError as error:
        if error.errno in {errno.EEXIST, errno.ENOENT}:
            raise InUseError(path) from error

        raise
    finally:
        if not is_ours:
            _remove_if_empty(beside)
            hold.release()

    return hold if is_ours else _make_then_hold(path, flock)


def _hold_beside(beside: str, path: str, flock: Flock) -> DirectoryHold:
    """Make the empty directory `beside` what will be `path`, unless it is there, and hold it.

    Raises:
        InUseError: If somebody else holds it, or has removed it.
        StorageError: If the medium refuses, or something lies in it.
    """
    is_made = True
    try:
        with translated("mkdir", path):
            os.mkdir(beside)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        is_made = False  # it was left there, or another one is as far

    try:
        hold = DirectoryHold(beside, name=path, flock=flock)
    except InUseError as error:
        if is_made and error.more and os.path.lexists(path):  # whoever claims the name needs this no more
            _remove_if_empty(beside)
        raise InUseError(path, error.more) from error
    except BaseException as error:
        if isinstance(error, StorageError) and error.errno == errno.ENOENT:
            raise InUseError(path) from error
        if is_made:
            _remove_if_empty(beside)
        raise

    try:
        if not is_made:
            _make_empty(beside)
    except BaseException:
        hold.release()
        raise

    return hold


def _make_empty(path: str) -> None:
    """Empty a directory that is held. After a power loss it is there again with what was built in it.

    Its later name is not synced, and what lies in it is. Under a name that is not ours, files are refused.
    """
    with translated("list", path):
        names = os.listdir(path)
    if names and _BUILT not in os.path.basename(path):
        raise StorageError("mkdir", path, "holds something that no save has put there", errno.ENOTEMPTY)

    for name in names:
        child = os.path.join(path, name)
        with translated("remove", child):
            if os.path.isdir(child):
                remove_tree(child)
            else:
                os.unlink(child)


def _remove_if_empty(path: str) -> None:
    with suppress(OSError):
        os.rmdir(path)


def _make_then_hold(path: str, flock: Flock) -> DirectoryHold:
    try:
        with translated("mkdir", path):
            os.mkdir(path)

        return DirectoryHold(path, flock=flock)
    except StorageError as error:
        if error.errno in {errno.EEXIST, errno.ENOENT}:  # it was there, or was taken and removed
            raise InUseError(path) from error

        raise
