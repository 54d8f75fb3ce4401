"""Names of unfinished checkpoints."""

from __future__ import annotations

__all__ = ("PARTIAL_SUFFIX", "TEMPORARY_SUFFIX", "temporary_path", "unfinished_at")

import os
from typing import Final

from penstock.kernel.errors import IncompleteCheckpointError, PathError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.holds import is_at_work

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


def unfinished_at(store: Store, path: str, built: str) -> IncompleteCheckpointError:
    """Return the error for a path of which there is only what a save builds, or built. Blocking."""
    if is_at_work(store, built):
        problem = f"its save goes on, in {built!r}; try again when that has ended"
        return IncompleteCheckpointError(path, problem, goes_on=True)
    if built == path:
        return IncompleteCheckpointError(path, "a save was interrupted here; its name says so")

    return IncompleteCheckpointError(
        path, f"a save was interrupted: there is only {os.path.basename(built)!r}"
    )
