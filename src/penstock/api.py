"""One save, one restore, one look: for callers who need a `Checkpointer` only once."""

from __future__ import annotations

__all__ = (
    "Checkpointer",
    "convert",
    "export_safetensors",
    "metadata",
    "restore",
    "restore_items",
    "save",
    "verify",
)

import os
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.checkpointer.description import CheckpointMetadata
from penstock.checkpointer.verify import VerifyReport
from penstock.kernel.messages.save import SaveReport
from penstock.tools.convert import convert, export_safetensors


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
        path: A checkpoint, an item in it, or a directory of steps, whose latest finished one is taken.
        **options: Those of `Checkpointer.restore`: `like`, `item`, `split`, `rename`, `dtype`, ...

    Raises:
        PenstockError: What `Checkpointer.restore` raises.
    """
    async with Checkpointer() as checkpointer:
        return await checkpointer.restore(path, **options)


async def restore_items(
    path: str | os.PathLike[str],
    *,
    like: Mapping[str, Any] | None = None,
    items: Iterable[str] | None = None,
    mmap: bool = False,
) -> dict[str, Any]:
    """Return the values of the items of the checkpoint at `path`, by name, all of one checkpoint.

    Trees, JSON, arrays and random keys come back as they were saved; a protobuf message as its text.

    Args:
        path: A checkpoint of several items, or a directory of steps, whose latest finished one is taken.
        like: What items are to be restored onto, by name: targets as for `restore`; of a protobuf
            message its class, or a message. Items that it does not have are restored as they are.
        items: Which; by default all.
        mmap: As for `Checkpointer.restore`.

    Raises:
        UnsupportedFormatError: If the checkpoint has no items, or one that penstock cannot read.
        NotACheckpointError: If it has not all that are asked for.
        SpecError: If `like` has what `items` has not.
        PenstockError: What `Checkpointer.restore` raises.

    Cancellation:
        Stops reading and gives back every byte.
    """
    async with Checkpointer() as checkpointer:
        return await checkpointer.restore_items(path, like=like, items=items, mmap=mmap)


async def metadata(path: str | os.PathLike[str], *, item: str | None = None) -> CheckpointMetadata:
    """Say what the checkpoint at `path` holds, without reading array data or touching a device.

    Raises:
        PenstockError: What `Checkpointer.metadata` raises.
    """
    async with Checkpointer() as checkpointer:
        return await checkpointer.metadata(path, item=item)


async def verify(path: str | os.PathLike[str], *, item: str | None = None) -> VerifyReport:
    """Compare the checkpoint at `path`, at rest, with the checksums that were recorded of it.

    Returns:
        What is damaged, if anything is, with the leaves concerned.

    Raises:
        PenstockError: What `Checkpointer.verify` raises.
    """
    async with Checkpointer() as checkpointer:
        return await checkpointer.verify(path, item=item)
