"""Names of unfinished checkpoints."""

from __future__ import annotations

__all__ = ("PARTIAL_SUFFIX", "TEMPORARY_SUFFIX", "temporary_path")

import os
from typing import Final

from penstock.kernel.errors import PathError

TEMPORARY_SUFFIX: Final = ".orbax-checkpoint-tmp"
"""Part of the name of a directory in which a checkpoint is being built, or was when the save was
interrupted."""

PARTIAL_SUFFIX: Final = ".partial_save"
"""In the name of the directory in which Orbax's v1 API gathers a partial save until it is finalized."""


def temporary_path(path: str) -> str:
    """Return the path where the checkpoint `path` is built before it is published.

    Raises:
        PathError: If `path` itself is named like an interrupted save, which no reader would open.
    """
    if TEMPORARY_SUFFIX in os.path.basename(path):
        raise PathError(path, f"has {TEMPORARY_SUFFIX!r} in its name, which marks an interrupted save")

    return path + TEMPORARY_SUFFIX
