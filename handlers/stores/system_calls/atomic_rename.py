"""Two renames that POSIX lacks: one that never replaces, and one that swaps two names (renameat2)."""

from __future__ import annotations

__all__ = (
    "Renameat2",
    "exchange",
    "exchange_in_steps",
    "rename_only_to_absent",
    "rename_to_absent",
    "system_renameat2",
)

import ctypes
import errno
import os
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import TypeAlias

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
        Where the old content of `second` lies now: at `first`, if they were swapped in one step.

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
        Where the old content of `second` lies now.

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
    """Remove a link that leads nowhere; return False if something else lies at `path`.

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
