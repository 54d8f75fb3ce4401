"""One save, one restore, one look: for callers who need a `Checkpointer` only once."""

from __future__ import annotations

__all__ = ("Checkpointer", "convert", "export_safetensors", "metadata", "restore", "save", "verify")

import os
from typing import Any

from penstock.checkpointer import Checkpointer
from penstock.converting import convert, export_safetensors
from penstock.description import CheckpointMetadata
from penstock.kernel.messages import SaveReport
from penstock.verifying import VerifyReport


async def save(path: str | os.PathLike[str], tree: object, **options: Any) -> SaveReport:
    """Save `tree` at `path` and return when it is durable and visible.

    Args:
        path: A directory that does not exist yet.
        tree: Any PyTree of handled leaf types.
        **options: Those of `Checkpointer.save`.

    Raises:
        PenstockError: What `Checkpointer.save` raises.

    Cancellation:
        Cancels the save; nothing of it is left on disk.
    """
    async with Checkpointer() as checkpointer:
        return await (await checkpointer.save(path, tree, **options))


async def restore(path: str | os.PathLike[str], **options: Any) -> Any:
    """Return the tree saved at `path`.

    Args:
        path: A checkpoint.
        **options: Those of `Checkpointer.restore`: `like`, `split`, `rename`, `transforms`, `dtype`, ...

    Raises:
        PenstockError: What `Checkpointer.restore` raises.
    """
    async with Checkpointer() as checkpointer:
        return await checkpointer.restore(path, **options)


async def metadata(path: str | os.PathLike[str]) -> CheckpointMetadata:
    """Say what the checkpoint at `path` holds, without reading array data or touching a device.

    Raises:
        PenstockError: What `Checkpointer.metadata` raises.
    """
    async with Checkpointer() as checkpointer:
        return await checkpointer.metadata(path)


async def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Compare the checkpoint at `path`, at rest, with the checksums that were recorded of it.

    Returns:
        What is damaged, if anything is, with the leaves concerned.

    Raises:
        PenstockError: What `Checkpointer.verify` raises.
    """
    async with Checkpointer() as checkpointer:
        return await checkpointer.verify(path)
