"""Deletes one checkpoint, on a disk or in a bucket."""

from __future__ import annotations

__all__ = ("delete",)

import os

from penstock.checkpointer.checkpointer import Path
from penstock.checkpointer.parts import config_and_regulator
from penstock.config.config import Config
from penstock.handlers.layouts.discovery import check_deletable
from penstock.handlers.stores.publishing.deletion import delete_file
from penstock.handlers.stores.publishing.paths import path_or_url, temporary_path
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import StorageError
from penstock.kernel.pipeline.failures import short_traceback
from penstock.kernel.protocols.stores import Store
from penstock.steps.step_directory import delete_step
from penstock.stores.store_finder import StoreFinder


@short_traceback
async def delete(path: Path, *, config: Config | Path | None = None, store: Store | None = None) -> None:
    """Delete the checkpoint at `path`; return when it is gone.

    The first step makes it invisible: on a disk a rename, in a bucket the deletion of its mark. So whatever
    interrupts it, no reader finds a part of a checkpoint.

    Args:
        path: A checkpoint or a step. Of a link, the link is deleted.
        config: As for `Checkpointer`.
        store: Where it is; by default where its path says, on a disk or in a bucket.

    Raises:
        NotACheckpointError: If there is nothing, or no checkpoint; nothing else is ever deleted.
        InUseError: If it is being read, built or deleted.
        StorageError: If the medium refuses.

    Cancellation:
        Returns when it is gone, or is still there as a whole.
    """
    final = path_or_url(path)
    options, _ = config_and_regulator(config, {})
    await Threads(1).run(_delete, StoreFinder(store, options.store).at(final), final)


def _delete(store: Store, path: str) -> None:
    kind = check_deletable(store, path)
    if kind == "file":
        delete_file(store, path, temporary_path(path))
        return

    left = delete_step(store, os.path.dirname(path), os.path.basename(path), None)
    if left is not None:
        problem = f"is no checkpoint any more, and something of it was left under a hidden name: {left}"
        raise StorageError("delete", path, problem, left.errno) from left
