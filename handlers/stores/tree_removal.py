"""Removing a directory with everything in it, also when the process has no descriptor left."""

from __future__ import annotations

__all__ = ("remove_tree",)

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

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
    # rmtree opens what it descends into, so that nobody can lead it elsewhere by a link.
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
