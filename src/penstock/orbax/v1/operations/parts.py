"""The parts that a tree is saved in: where they lie until they are put together, and what is in them."""

from __future__ import annotations

__all__ = (
    "check_new",
    "filled_leaves",
    "gathered_at",
    "new_part_name",
    "parts_in",
    "saving_of_parts",
)

import json
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from anyio import to_thread

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.formats.orbax.checkpoint_metadata import CheckpointMetadata
from penstock.handlers.formats.orbax.file_names import METADATA, PARTIAL_SUFFIX
from penstock.handlers.formats.orbax.sealed_documents import SealedDocuments
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.protocols.leaf import KeyPath, ParamInfo
from penstock.orbax.common.item_files import sealed_documents
from penstock.orbax.v0.trees.tree_operations import merge_trees
from penstock.orbax.v1.common.item_names import STATE
from penstock.orbax.v1.common.v1_errors import PartialSaveReplacementError
from penstock.orbax.v1.context.context import Context
from penstock.orbax.v1.operations.saving import Saving
from penstock.orbax.v1.trees.pytree_handler import PyTreeHandler
from penstock.orbax.v1.trees.tree_files import read_tree
from penstock.stages.pytree.flattening import flatten_tree, is_empty

_PENDING: Final = ".pending_"


def gathered_at(path: str) -> str:
    """Return the directory of the parts of the checkpoint at `path`."""
    return path + PARTIAL_SUFFIX


def new_part_name(path: str) -> str:
    """Return a name for a part of the checkpoint at `path`, which tells it and when it was begun."""
    return f"{os.path.basename(path)}{_PENDING}{time.time_ns()}_{uuid.uuid4().hex}"


def parts_in(gathered: str) -> Sequence[str]:
    """Return the directories of all parts, in the order in which they were begun. Blocking."""
    store = LocalStore()
    if store.kind(gathered) != "directory":
        return []

    found = [name for name in store.list_directory(gathered) if _is_part(name)]
    return [os.path.join(gathered, name) for name in sorted(found, key=lambda name: name.split("_")[-2:])]


def _is_part(name: str) -> bool:
    _, pending, rest = name.rpartition(_PENDING)
    return bool(pending) and "." not in rest  # or it is one that was interrupted


def filled_leaves(state: Any) -> Sequence[ParamInfo]:
    """Return the leaves of a part that no other part may have: those that are not empty."""
    return [leaf.info for leaf in flatten_tree(state)[0] if not is_empty(leaf.value)]


def check_new(gathered: str, leaves: Sequence[ParamInfo]) -> None:
    """Refuse leaves that are in an earlier part, or above or below a leaf of one. Blocking.

    Args:
        gathered: The directory of the parts.
        leaves: Of the new part, see `filled_leaves`.

    Raises:
        PartialSaveReplacementError: If there is such a leaf.
    """
    known: set[KeyPath] = set()
    for directory in parts_in(gathered):
        tree = read_tree(os.path.join(directory, STATE))
        known.update(
            [keys for keys, spec in zip(tree.keys, tree.specs, strict=True) if not spec.is_empty_marker]
        )

    above = {keys[:n] for keys in known for n in range(len(keys))}
    for leaf in leaves:
        keys = leaf.keys
        if keys in known or keys in above or any(keys[:n] in known for n in range(len(keys))):
            raise PartialSaveReplacementError(
                f"{leaf.key_path} was found in an earlier partial save. Partial saving currently does "
                "not support REPLACEMENT."
            )


async def saving_of_parts(path: str, parts: Sequence[str], context: Context) -> Saving:
    """Return the save of all parts as one tree, mapped into memory and compared with their checksums.

    Raises:
        PartialSaveReplacementError: If two of them share a leaf.
    """
    store = LocalStore()
    about = [await to_thread.run_sync(_about, store, part) for part in parts]
    custom = {key: value for one in about for key, value in (one.custom_metadata or {}).items()}
    context = await to_thread.run_sync(_as_saved, context, parts[0])
    tree = await _merged(parts, context.memory.read_concurrent_bytes)
    return Saving(path, {STATE: tree}, {STATE: PyTreeHandler(context=context)}, context, False, custom)


async def _merged(parts: Sequence[str], memory_limit: int | None) -> Any:
    async with Checkpointer(memory_limit=memory_limit) as checkpointer:
        trees = [
            await checkpointer.restore(os.path.join(part, STATE), mmap=True, verify=True) for part in parts
        ]

    try:
        return merge_trees(*trees)
    except ValueError as error:
        raise PartialSaveReplacementError(
            f"{error}. Partial saving currently does not support REPLACEMENT."
        ) from error


def _as_saved(context: Context, part: str) -> Context:
    """Return a context with the format of a part."""
    recorded = json.loads(sealed_documents(LocalStore(), os.path.join(part, STATE)).read(METADATA))
    found = Context(context)
    saving = found.array.saving
    saving.use_ocdbt = recorded.get("use_ocdbt", saving.use_ocdbt)
    saving.use_zarr3 = recorded.get("use_zarr3", saving.use_zarr3)
    return found


def _about(store: LocalStore, part: str) -> CheckpointMetadata:
    names = store.list_directory(part)
    return SealedDocuments.open(store, part, names).about(names)
