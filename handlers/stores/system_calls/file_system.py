"""The system calls that some file systems refuse, and what is weaker where one does without them."""

from __future__ import annotations

__all__ = ("FileSystem", "SystemCalls")

import errno
import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from penstock.handlers.stores.system_calls.atomic_rename import Renameat2, system_renameat2

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

        if any(_is_unknown(value) for value in (found.f_flag, found.f_bfree, found.f_bavail, found.f_blocks)):
            self.note_weaker("statvfs", path)
            return None

        return found


def _is_unknown(value: int) -> bool:
    """True if a number of statvfs is -1, of whatever width, or another negative one."""
    return value < 0 or value >= 2**63 or value == 2**32 - 1
