"""The system calls that some file systems refuse, and what is weaker where one does without them.

Among them are two renames that POSIX lacks (renameat2): one never replaces, one swaps two names.
"""

from __future__ import annotations

__all__ = (
    "FileSystem",
    "Renameat2",
    "SystemCalls",
    "exchange",
    "exchange_in_steps",
    "rename_only_to_absent",
    "rename_to_absent",
    "system_renameat2",
)

import ctypes
import errno
import fcntl
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, TypeAlias, final

AT_FDCWD = -100
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

# A file system without the flag fails with EINVAL (NFS, some FUSE), a kernel without the call with ENOSYS, a
# container whose filter does not know the call with EPERM. If a rename is not permitted, `os.rename` says so.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})

Renameat2: TypeAlias = Callable[[str, str, int], object]
"""Renames with flags, or raises `OSError`: ENOSYS if there is no such call."""


def system_renameat2(source: str, destination: str, flags: int) -> None:
    """Call renameat2 of Linux 3.15.

    Raises:
        OSError: If it fails, or this system has none.
    """
    call = _find_renameat2()
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
    if call(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(destination), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, destination)


def rename_to_absent(source: str, destination: str, renameat2: Renameat2 = system_renameat2) -> bool:
    """Rename in one step, without replacing. Where the system cannot do that, check first, then rename.

    A link that leads nowhere counts as nothing, and is removed.

    Returns:
        Whether it was one step.

    Raises:
        FileExistsError: If the destination exists, even as an empty directory.
        OSError: As `os.rename` does.
    """
    if rename_only_to_absent(source, destination, renameat2):
        return True
    if os.path.lexists(destination) and not _remove_dangling(destination):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination)

    os.rename(source, destination)
    return False


def rename_only_to_absent(source: str, destination: str, renameat2: Renameat2 = system_renameat2) -> bool:
    """Rename in one step, without replacing; return False, with nothing renamed, where the system cannot.

    A link that leads nowhere counts as nothing, and is removed.

    Raises:
        FileExistsError: If the destination exists, even as an empty directory.
        OSError: As `os.rename` does.
    """
    try:
        return _attempt(renameat2, source, destination, RENAME_NOREPLACE)
    except FileExistsError:
        if not _remove_dangling(destination):
            raise

    return _attempt(renameat2, source, destination, RENAME_NOREPLACE)


def exchange(first: str, second: str, renameat2: Renameat2 = system_renameat2) -> str:
    """Put `first` in the place of `second`, in one step where the file system can do that, else in three.

    Returns:
        Where the old content of `second` is now: at `first`, if they were swapped in one step.

    Raises:
        OSError: As `os.rename` does; the names are then as they were.
    """
    is_done = _attempt(renameat2, first, second, RENAME_EXCHANGE)
    return first if is_done else exchange_in_steps(first, second)


def exchange_in_steps(first: str, second: str) -> str:
    """Put `first` in the place of `second` by three renames.

    `second` is renamed to `<second>.penstock-aside-<hex>`, then `first` to `second`, then the aside name to
    `<first>-<hex>`. It does not become `first`, since as soon as that name is free, another may take it. So
    `second` is absent between the first two renames. If the process dies there, the old content of `second`
    is intact under the aside name. If a rename fails, the earlier ones are undone.

    Returns:
        Where the old content of `second` is now.

    Raises:
        OSError: As `os.rename` does; the names are then as they were.
    """
    unique = uuid.uuid4().hex
    aside, old = f"{second}.penstock-aside-{unique}", f"{first}-{unique}"
    with ExitStack() as undo:
        for source, destination in ((second, aside), (first, second), (aside, old)):
            os.rename(source, destination)
            undo.callback(os.rename, destination, source)

        undo.pop_all()

    return old


def _remove_dangling(path: str) -> bool:
    """Remove a link that leads nowhere; return False if something else is at `path`.

    It is renamed first and looked at again, since another one may have replaced it meanwhile.
    """
    if not os.path.islink(path) or os.path.exists(path):
        return False

    aside = f"{path}.penstock-aside-{uuid.uuid4().hex}"
    os.rename(path, aside)
    if not os.path.islink(aside):
        os.rename(aside, path)
        return False

    os.unlink(aside)
    return True


def _attempt(renameat2: Renameat2, source: str, destination: str, flags: int) -> bool:
    """Return True if the rename was done, False if this system or file system cannot do it.

    Raises:
        OSError: If it can, and it failed.
    """
    try:
        renameat2(source, destination, flags)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False

        raise

    return True


@cache
def _find_renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None  # not Linux, or a C library before glibc 2.28

    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call


Weakness: TypeAlias = Literal["flock", "fsync", "renameat2", "statvfs"]
"""The call that a file system refuses."""

_WEAKER: Final[Mapping[Weakness, str]] = {
    "flock": "files with claims take the place of locks, and a checkpoint may be deleted while it is read",
    "fsync": "directories cannot be synced: a power loss may undo what was published or deleted",
    "renameat2": "names cannot be swapped: a path that is overwritten is absent for a moment",
    "statvfs": "the room that is left is not known: a save that does not fit fails on its way",
}

_NO_CALL: Final = frozenset({0, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})


@final
@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The system's own; in a test, such as a file system refuses."""

    flock: Callable[[int, int], object] = fcntl.flock
    fsync: Callable[[int], object] = os.fsync  #: of directories alone
    renameat2: Renameat2 = system_renameat2
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs


@final
class FileSystem:
    """Makes the calls of one store. What is weaker without one is logged once, as `store.weaker`.

    Args:
        calls: The system's.
    """

    __slots__ = ("_said", "calls")

    def __init__(self, calls: SystemCalls | None = None) -> None:
        self.calls = SystemCalls() if calls is None else calls
        self._said: set[Weakness] = set()

    def note_weaker(self, lacks: Weakness, path: str) -> None:
        """Log what is weaker without a call, unless that was done. From any thread."""
        if lacks not in self._said:
            self._said.add(lacks)
            from penstock.kernel.events import get_logger  # the command line is quick without it

            get_logger().warning("store.weaker", lacks=lacks, weaker=_WEAKER[lacks], path=path)

    def sync_directory(self, number: int, path: str) -> None:
        """Make the entries of an open directory durable, where the file system can do that.

        Raises:
            OSError: If it can, and failed.
        """
        try:
            self.calls.fsync(number)
        except OSError as error:
            if error.errno not in _NO_CALL:
                raise

            self.note_weaker("fsync", path)

    def is_read_only(self, path: str) -> bool:
        """True if the file system of `path` says that it is mounted so; False if it says nothing."""
        found = self._statvfs(path)
        return found is not None and bool(found.f_flag & os.ST_RDONLY)

    def free_bytes(self, path: str) -> int | None:
        """Return the room on the file system of `path`, as far as this user may take it; None if unknown."""
        found = self._statvfs(path)
        if found is None or not found.f_blocks:
            return None

        return (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize

    def _statvfs(self, path: str) -> os.statvfs_result | None:
        """Return what the file system says of itself; None if it does not, or says -1.

        Raises:
            OSError: If `path` cannot be asked for another reason.
        """
        try:
            found = self.calls.statvfs(path)
        except OSError as error:
            if error.errno not in _NO_CALL | {errno.EPERM}:
                raise

            self.note_weaker("statvfs", path)
            return None

        numbers = (found.f_flag, found.f_bfree, found.f_bavail, found.f_blocks)
        if any(value < 0 or value >= 2**63 or value == 2**32 - 1 for value in numbers):  # -1, of any width
            self.note_weaker("statvfs", path)
            return None

        return found
