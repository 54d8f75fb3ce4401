"""Deleting a checkpoint, or one item of it."""

from __future__ import annotations

__all__ = ("delete", "delete_async")

import json
import os
from typing import Any, cast

from penstock.embedding import built_in, delete_step, deletion, document_files, file_names, kernel, paths
from penstock.errors import PathError, StorageError
from penstock.orbax.item_files import store_at
from penstock.orbax.v1.handler_registration import check_names
from penstock.orbax.v1.locating import Kind, find, item_names
from penstock.orbax.v1.operation import AsyncResponse, Operation, begin, finished
from penstock.orbax.v1.options import CheckpointLayout
from penstock.orbax.v1.path_types import PathLike


def delete(path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
    """Delete a checkpoint, or one item of it.

    It is renamed first, so that at no time part of it passes for a checkpoint.

    Args:
        path: Of a single checkpoint.
        checkpointable_name: The item; by default the whole checkpoint.
        missing_ok: Whether it may be absent.

    Returns:
        Whether there was something to delete.

    Raises:
        FileNotFoundError: If there is nothing, and `missing_ok` is off.
        InvalidLayoutError: If what is there is no checkpoint. It is a ValueError.
        ValueError: If the item is the only one, or its name is not allowed.
        StorageError: If penstock reads it or saves there elsewhere on this machine, or the medium refuses.
    """
    return finished(_begin(path, checkpointable_name, missing_ok=missing_ok))


def delete_async(
    path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> AsyncResponse[bool]:
    """Begin to delete, and return; what goes wrong is raised by the response. See `delete`."""
    return _begin(path, checkpointable_name, missing_ok=missing_ok)


def _begin(path: PathLike, name: str | None, *, missing_ok: bool) -> Operation[bool]:
    place = paths.path_or_url(path)
    if name is not None and paths.bucket_of(place) is not None:
        raise PathError(place, "is in a bucket, where no single item is deleted; delete the checkpoint")
    if name is not None:
        check_names((name,))

    async def run(operation: Operation[bool]) -> bool:
        return await kernel.Threads(1).run(_delete, place, name, missing_ok)

    return begin(f"delete {place!r}", run)


def _delete(path: str, name: str | None, missing_ok: bool) -> bool:
    store = store_at(path)
    if paths.bucket_of(path) is None and not os.path.lexists(path):
        return _absent(path, missing_ok)
    if paths.bucket_of(path) is not None and store.kind(path) is None:
        return _absent(path, missing_ok)

    found = find(path, CheckpointLayout.AUTO)
    doomed = path
    if name is not None:
        names = item_names(found)
        doomed = os.path.join(path, name)
        if name not in names:
            return _absent(doomed, missing_ok)
        if names == [name]:
            raise ValueError(f"{name!r} is the only checkpointable of {path}: delete the whole checkpoint")

    if found.kind is Kind.SAFETENSORS and os.path.isfile(path):
        deletion.delete_file(built_in.LocalStore(), path, file_names.temporary_path(path))
        return True

    if name is None:
        delete_step(store, os.path.dirname(doomed), os.path.basename(doomed), None)
    else:
        _delete_item(built_in.LocalStore(), path, name)

    return True


def _delete_item(store: built_in.LocalStore, path: str, name: str) -> None:
    """Delete an item that the checkpoint no longer lists by then: one that is listed and lost is damage."""
    file = os.path.join(path, file_names.CHECKPOINT_METADATA)
    data = store.read_file(file) if store.kind(file) == "file" else b""
    listed: dict[str, Any] = json.loads(data) if data else {}
    handlers = listed.get("item_handlers")
    if not isinstance(handlers, dict) or name not in handlers:
        delete_step(store, path, name, None)
        return

    others = {item: handler for item, handler in cast("dict[str, Any]", handlers).items() if item != name}
    document_files.replace_file(store, file, json.dumps({**listed, "item_handlers": others}).encode())
    try:
        delete_step(store, path, name, None)
    except StorageError:
        document_files.replace_file(store, file, data)
        raise


def _absent(path: str, missing_ok: bool) -> bool:
    if not missing_ok:
        raise FileNotFoundError(f"there is nothing to delete at {path}")

    return False
