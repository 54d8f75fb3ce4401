"""Symbolic links in a checkpoint: those that lead out of it could show any file to whoever restores it."""

from __future__ import annotations

__all__ = ("Links", "check_links")

import os
from typing import Literal, TypeAlias

from penstock.handlers.stores.descriptor import translated
from penstock.kernel.errors import LinkOutsideError

Links: TypeAlias = Literal["inside", "any"]
"""Which links a checkpoint may have in it."""


def check_links(root: str, directory: str) -> None:
    """Refuse symbolic links at and below `directory` that lead out of `root`. Blocking; opens no file.

    In the cache of the Hugging Face hub, all files of a snapshot are links to the `blobs` beside it: these
    are allowed.

    Args:
        root: A checkpoint; may be a link itself.
        directory: The part of it to look at; `root` or a directory below it.

    Raises:
        LinkOutsideError: If there is one.
        StorageError: If a directory cannot be listed.
    """
    allowed = [os.path.realpath(root)]
    above, folder = os.path.split(os.path.dirname(allowed[0]))
    if folder == "snapshots":
        allowed.append(os.path.join(above, "blobs"))

    if directory != root and os.path.islink(directory):
        _check(directory, allowed)

    pending = [directory]
    while pending:
        path = pending.pop()
        with translated("list", path), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_symlink():
                    _check(entry.path, allowed)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def _check(path: str, allowed: list[str]) -> None:
    target = os.path.realpath(path)
    if not any(target == place or target.startswith(os.path.join(place, "")) for place in allowed):
        raise LinkOutsideError(path, target)
