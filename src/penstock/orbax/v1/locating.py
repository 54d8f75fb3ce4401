"""A checkpoint at a path: its layout, the item that holds its tree, and deleting it or an item of it."""

from __future__ import annotations

__all__ = (
    "Kind",
    "PyTreeMetadata",
    "Survey",
    "delete",
    "delete_async",
    "find",
    "is_orbax_checkpoint",
    "item_names",
    "tree_name",
)

import enum
import json
import os
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, final

from penstock import handlers as built_in
from penstock import kernel
from penstock.embedding import (
    checkpoint_metadata,
    deletion,
    document_files,
    file_names,
    find_place,
    paths,
    step_directory,
)
from penstock.errors import ChecksumError, MissingFileError, PathError, StorageError
from penstock.orbax.item_files import store_at
from penstock.orbax.v1.errors import InvalidLayoutError
from penstock.orbax.v1.handler_registration import AUTO, RESERVED, STATE, check_names
from penstock.orbax.v1.operation import AsyncResponse, BackgroundOperation, begin, wait_for
from penstock.orbax.v1.options import CheckpointLayout
from penstock.orbax.v1.path import PathLike


class Kind(enum.Enum):
    """The kind of a checkpoint."""

    V1 = 1  #: named items, written by the newer API
    V0 = 0  #: named items, or one tree, written by the established one
    SAFETENSORS = 2


@final
@dataclass(frozen=True, slots=True)
class Survey:
    """A checkpoint, and what it records of itself."""

    path: str
    kind: Kind
    names: frozenset[str]  #: of what is in its directory
    about: checkpoint_metadata.CheckpointDocument
    store: kernel.Store

    def is_tree(self, name: str | None) -> bool:
        """Return whether an item is a tree; with None, whether the checkpoint itself is."""
        if name is None:
            return file_names.METADATA in self.names

        return self.store.kind(os.path.join(self.path, name, file_names.METADATA)) == "file"

    def recorded(self, name: str | None) -> str | None:
        """Return the recorded handler of an item; None if none is recorded."""
        handlers = self.about.item_handlers
        if isinstance(handlers, str):
            return handlers if name is None else None

        return None if handlers is None or name is None else handlers.get(name)


def is_orbax_checkpoint(path: PathLike) -> bool:
    """Return whether a finished checkpoint of Orbax's layout is at `path`; a damaged one is one, too."""
    try:
        find(path, CheckpointLayout.ORBAX)
    except (ChecksumError, MissingFileError):
        return True
    except InvalidLayoutError:
        return False

    return True


def find(path: PathLike, layout: CheckpointLayout, *, marked: bool = False) -> Survey:
    """Look at the checkpoint at a path.

    Args:
        path: Of the checkpoint.
        layout: What it is to be.
        marked: Whether it is only finished with its commit mark; safetensors have none.

    Raises:
        InvalidLayoutError: If it is not a finished checkpoint of the layout.
        ChecksumError: If what it records of itself is not as it was written.
        MissingFileError: If that was written and is lost.
    """
    place = paths.path_or_url(path)
    try:
        found = _find(place, layout)
    except (ChecksumError, MissingFileError):
        raise  # it is of this layout, and damaged
    except (OSError, ValueError) as error:
        raise InvalidLayoutError(
            f"Could not recognize the checkpoint at {place} as a valid {layout.value.capitalize()} "
            "checkpoint. If it is of another layout, say so with `ctx.checkpoint_layout = ...`."
        ) from error

    if marked and found.kind is not Kind.SAFETENSORS and file_names.COMMIT_MARK not in found.names:
        raise InvalidLayoutError(
            f"Found incomplete checkpoint at {place}: it has no {file_names.COMMIT_MARK}."
        )

    return found


def tree_name(found: Survey, name: str | None) -> str | None:
    """Return the name of the item that holds the tree; None if the checkpoint itself is it.

    Args:
        found: The checkpoint.
        name: The name of the item; `AUTO` for `state`, or else the first tree in alphabetical order.

    Raises:
        InvalidLayoutError: If there is no such tree.
    """
    if name == AUTO:
        for candidate in item_names(found):
            if found.is_tree(candidate):
                return candidate
        if found.kind is Kind.V0 and found.is_tree(None):
            return None

        raise InvalidLayoutError(f"path={found.path!r} has no PyTree checkpointable that could be loaded")

    if name is None and found.kind is Kind.V1:
        raise InvalidLayoutError(
            f"{found.path} has named items, as checkpoints of the newer API have: "
            "`checkpointable_name=None` is only for a V0 checkpoint that is itself a tree."
        )
    if not found.is_tree(name):
        trees = [item for item in item_names(found) if found.is_tree(item)]
        here = " It is itself a tree: load it with checkpointable_name=None." if found.is_tree(None) else ""
        raise InvalidLayoutError(f"{found.path} has no PyTree {name!r}; there are {trees}.{here}")

    return name


def item_names(found: Survey) -> list[str]:
    """Return the names of all items: `state` first, the others in alphabetical order."""
    names = [
        name
        for name in found.names
        if name not in RESERVED
        and file_names.TEMPORARY_SUFFIX not in name  # what a deletion left that was interrupted
        and found.store.kind(os.path.join(found.path, name)) == "directory"
    ]
    return sorted(names, key=lambda name: (name != STATE, name))


def _find(path: str, layout: CheckpointLayout) -> Survey:
    store = store_at(path, snapshot=True)
    place = find_place(store, path)
    names = frozenset(store.list_directory(path)) if store.kind(path) == "directory" else frozenset[str]()
    if layout is not CheckpointLayout.ORBAX and place.kind == "tensors":
        return Survey(path, Kind.SAFETENSORS, names, checkpoint_metadata.CheckpointDocument(), store)
    if layout is CheckpointLayout.SAFETENSORS:
        raise ValueError(f"{path} is neither a safetensors file nor a directory with one")
    if file_names.V1_MARK in names and file_names.CHECKPOINT_METADATA not in names:
        raise FileNotFoundError(
            f"Checkpoint path {path} is missing the file {file_names.CHECKPOINT_METADATA!r}."
        )

    kind = Kind.V1 if file_names.V1_MARK in names else Kind.V0
    if kind is Kind.V0:
        parent = os.path.dirname(path)
        if store.kind(os.path.join(parent, file_names.CHECKPOINT_METADATA)) is not None:
            raise ValueError(f"{path} is an item of a checkpoint: load it from {parent}, by its name.")
        if place.steps:
            raise ValueError(f"{path} is a directory of checkpoints, one of which is meant: {place.steps}")
        if place.kind != "checkpoint":
            raise ValueError(f"{path} is not itself a checkpoint: load one that is in it, if any is.")

    return Survey(path, kind, names, document_files.sealed_documents(store, path).about(names), store)


PyTreeMetadata: TypeAlias = Any
"""A tree of dicts and lists that holds the metadata of each leaf."""


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
    return wait_for(_begin(path, checkpointable_name, missing_ok=missing_ok))


def delete_async(
    path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> AsyncResponse[bool]:
    """Begin to delete, and return; what goes wrong is raised by the response. See `delete`."""
    return _begin(path, checkpointable_name, missing_ok=missing_ok)


def _begin(path: PathLike, name: str | None, *, missing_ok: bool) -> BackgroundOperation[bool]:
    place = paths.path_or_url(path)
    if name is not None and paths.scheme_of(place) is not None:
        raise PathError(place, "is in a bucket, where no single item is deleted; delete the checkpoint")
    if name is not None:
        check_names((name,))

    async def run(operation: BackgroundOperation[bool]) -> bool:
        return await kernel.Threads(1).run(_delete, place, name, missing_ok)

    return begin(f"delete {place!r}", run)


def _delete(path: str, name: str | None, missing_ok: bool) -> bool:
    store = store_at(path)
    if paths.scheme_of(path) is None and not os.path.lexists(path):
        return _absent(path, missing_ok)
    if paths.scheme_of(path) is not None and store.kind(path) is None:
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
        deletion.delete_file(built_in.LocalStore(), path, paths.temporary_path(path))
        return True

    if name is None:
        step_directory.delete_step(store, os.path.dirname(doomed), os.path.basename(doomed), None)
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
        step_directory.delete_step(store, path, name, None)
        return

    others = {item: handler for item, handler in cast("dict[str, Any]", handlers).items() if item != name}
    document_files.replace_file(store, file, json.dumps({**listed, "item_handlers": others}).encode())
    try:
        step_directory.delete_step(store, path, name, None)
    except StorageError:
        document_files.replace_file(store, file, data)
        raise


def _absent(path: str, missing_ok: bool) -> bool:
    if not missing_ok:
        raise FileNotFoundError(f"there is nothing to delete at {path}")

    return False
