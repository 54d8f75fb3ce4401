"""The system calls that some file systems refuse, and the weaker guarantees without them.

Among them are two renames that POSIX lacks (renameat2): one never replaces, one swaps two names. And the
removal of a directory with everything in it, also when the process has no descriptor left.
"""

from __future__ import annotations

__all__ = (
    "NO_CALL",
    "FileSystem",
    "Renameat2",
    "SystemCalls",
    "c_function",
    "exchange",
    "exchange_in_steps",
    "remove_tree",
    "rename_only_to_absent",
    "rename_to_absent",
    "system_renameat2",
)

import ctypes
import errno
import fcntl
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, TypeAlias, final

AT_FDCWD = -100
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

# A file system without the flag fails with EINVAL (NFS, some FUSE), a kernel without the call with ENOSYS, a
# container whose filter does not know the call with EPERM. If a rename is not permitted, `os.rename` says so.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM})

Renameat2: TypeAlias = Callable[[str, str, int], object]
"""Renames with flags, or raises `OSError`: ENOSYS if there is no such call."""


@cache
def c_function(name: str, *argument_types: type) -> Callable[..., int] | None:
    """Find a function of the C library that Python lacks; None if this library has none of the name.

    The caller sees to it that the function is Linux's, if other systems have another one of its name.
    """
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None

    call.argtypes = argument_types
    call.restype = ctypes.c_int
    found: Callable[..., int] = call
    return found


def system_renameat2(source: str, destination: str, flags: int) -> None:
    """Call renameat2 of Linux 3.15.

    Raises:
        OSError: If it fails, or this system has none.
    """
    # In the C library since glibc 2.28.
    call = c_function(
        "renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
    )
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
    for is_last in (False, True):  # who makes such links again and again is not outrun
        try:
            renameat2(source, destination, RENAME_NOREPLACE)
        except FileExistsError:
            if is_last or not _remove_dangling(destination):
                raise
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False

            raise
        else:
            break

    return True


def exchange(first: str, second: str, renameat2: Renameat2 = system_renameat2) -> str:
    """Put `first` in the place of `second`, in one step where the file system can do that, else in three.

    Returns:
        Where the old content of `second` is now: at `first`, if they were swapped in one step.

    Raises:
        OSError: As `os.rename` does; the names are then as they were.
    """
    try:
        renameat2(first, second, RENAME_EXCHANGE)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return exchange_in_steps(first, second)

        raise

    return first


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


Weakness: TypeAlias = Literal["flock", "fsync", "renameat2", "statvfs"]
"""The call that a file system refuses."""

_WEAKER: Final[Mapping[Weakness, str]] = {
    "flock": "files with claims take the place of locks, and a checkpoint may be deleted while it is read",
    "fsync": "directories cannot be synced: a power loss may undo what was published or deleted",
    "renameat2": "names cannot be swapped: a path that is overwritten is absent for a moment",
    "statvfs": "the room that is left is not known: a save that does not fit fails on its way",
}

NO_CALL: Final = frozenset({0, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})


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

    def statvfs(self, path: str) -> os.statvfs_result | None:
        """Return what the file system says of itself; None if it does not, or says -1.

        Raises:
            OSError: If `path` cannot be asked for another reason.
        """
        try:
            found = self.calls.statvfs(path)
        except OSError as error:
            if error.errno not in NO_CALL | {errno.EPERM}:
                raise

            self.note_weaker("statvfs", path)
            return None

        for value in (found.f_flag, found.f_bfree, found.f_bavail, found.f_blocks):
            if value < 0 or value >= 2**63 or value == 2**32 - 1:  # -1, of any width
                self.note_weaker("statvfs", path)
                return None

        return found


_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE})
_WAITS_S: Final = (0.01, 0.05, 0.1, 0.2)  # for a descriptor that another thread was faster to take


def remove_tree(path: str, give_up_spare: Callable[[], object] = lambda: None) -> None:
    """Remove the directory at `path` once; of a symbolic link, the link alone. It may be absent.

    What others remove meanwhile is passed over. What others create at `path` once it is removed stays: it is
    theirs.

    Args:
        path: Of the directory.
        give_up_spare: Called when the process has no descriptor left; closes one that was kept for this.

    Raises:
        OSError: If the system refuses.
    """
    if os.path.islink(path):
        with suppress(FileNotFoundError):
            os.unlink(path)
        return

    try:
        _remove_safely(path)
    except OSError as error:
        if error.errno not in _EXHAUSTED:
            raise

        give_up_spare()
        _remove_with_one_descriptor(path)


def _remove_safely(path: str) -> None:
    # rmtree opens what it descends into, so that no link can lead it elsewhere.
    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=lambda _function, _path, error: _unless_gone(error))
    else:
        shutil.rmtree(path, onerror=lambda _function, _path, raised: _unless_gone(raised[1]))


def _unless_gone(error: Any) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _remove_with_one_descriptor(path: str) -> None:
    for wait_s in (*_WAITS_S, None):
        try:
            _remove(path)
        except OSError as error:
            if error.errno not in _EXHAUSTED or wait_s is None:
                raise

            time.sleep(wait_s)
        else:
            return


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        try:
            os.rmdir(path)  # needs no descriptor, if it is empty
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
        else:
            return

        with os.scandir(path) as entries:
            found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]

        for inner, is_directory in found:
            if is_directory:
                _remove(inner)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(inner)

        os.rmdir(path)
