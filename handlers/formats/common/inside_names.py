"""Names of files in documents: one that leads out of the checkpoint is not followed."""

from __future__ import annotations

__all__ = ("check_inside",)

import os

from penstock.kernel.errors import CorruptCheckpointError


def check_inside(path: str, name: str) -> None:
    """Raise unless a name, relative to a directory, leads to a place in it.

    An untrusted checkpoint must not make its reader open other files.

    Args:
        path: What says so: a document, or the directory, for the error.
        name: With slashes.

    Raises:
        CorruptCheckpointError: If it is absolute, goes up, or has a zero byte, which no file name has.
    """
    if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise CorruptCheckpointError(path, f"{name!r} leads out of the checkpoint"[:300])
