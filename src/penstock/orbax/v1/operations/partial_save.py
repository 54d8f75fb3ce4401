"""Saving a tree part by part. Nothing is visible at its path until all parts are put together."""

from __future__ import annotations

__all__ = ("finalize", "save", "save_async")

import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from anyio import to_thread

from penstock.checkpointer.checkpointer import Checkpointer
from penstock.handlers.formats.common.temporary_names import PARTIAL_SUFFIX
from penstock.handlers.formats.orbax.documents.checkpoint_metadata import CheckpointMetadata
from penstock.handlers.formats.orbax.documents.file_names import METADATA
from penstock.handlers.formats.orbax.documents.sealed_documents import SealedDocuments
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import ConfigError
from penstock.kernel.protocols.leaf import KeyPath
from penstock.kernel.storage.holds import hold_alone, hold_with_readers
from penstock.kernel.storage.paths import absolute_path
from penstock.orbax.common.item_files import sealed_documents
from penstock.orbax.v0.trees.tree_operations import merge_trees
from penstock.orbax.v1.common.item_names import STATE
from penstock.orbax.v1.common.operation import AsyncResponse, Operation, begin, finished
from penstock.orbax.v1.common.path_types import PathLike
from penstock.orbax.v1.common.tree_types import JsonType, PyTreeOf
from penstock.orbax.v1.common.v1_errors import PartialSaveReplacementError
from penstock.orbax.v1.context.context import Context, get_context
from penstock.orbax.v1.operations.saving import Saving, check_state, prepare_save, saves_jointly, staged
from penstock.orbax.v1.trees.pytree_handler import PyTreeHandler
from penstock.orbax.v1.trees.tree_files import read_tree
from penstock.stages.pytree.flattening import flatten_tree, is_empty

_PENDING: Final = ".pending_"


def save(path: PathLike, state: PyTreeOf, *, custom_metadata: JsonType | None = None) -> None:
    """Save a part of a tree, beside `path`; return when it is durable. See `save_async`."""
    finished(_begin(path, state, custom_metadata))


def save_async(
    path: PathLike, state: PyTreeOf, *, custom_metadata: JsonType | None = None
) -> AsyncResponse[None]:
    """Start to save a part of a tree beside `path`; return when the part may be changed.

    Args:
        path: Where `finalize` will put the checkpoint.
        state: A tree whose leaves are in no earlier part.
        custom_metadata: JSON values kept with the checkpoint; later parts replace those of earlier ones.

    Raises:
        FileExistsError: If something exists at `path`.
        PartialSaveReplacementError: If a leaf is in an earlier part.
        ValueError: If the part cannot be saved, or several processes are to save it together.
    """
    return staged(_begin(path, state, custom_metadata))


def finalize(path: PathLike) -> None:
    """Put all parts that were saved for `path` together, and make the checkpoint visible there.

    Raises:
        InUseError: If a part is being saved, or somebody else finalizes. It is an OSError.
        FileExistsError: If something exists at `path`.
        FileNotFoundError: If no part was saved.
        PartialSaveReplacementError: If two parts that were saved at the same time share a leaf.
    """
    place = absolute_path(path)
    if place.endswith(PARTIAL_SUFFIX):
        place = place.removesuffix(PARTIAL_SUFFIX)

    finished(begin(f"finalize {place!r}", _Finalizing(place, get_context())))


def _begin(path: PathLike, state: PyTreeOf, custom_metadata: JsonType | None) -> Operation[None]:
    place = absolute_path(path)
    if saves_jointly(get_context()):
        raise ConfigError("primary_host", "is not None, and several processes cannot save parts together")
    if os.path.exists(place):
        raise FileExistsError(f"Finalized checkpoint already exists at {place}.")

    check_state(state)
    gathered = place + PARTIAL_SUFFIX
    _check_new(gathered, state)
    pending = f"{os.path.basename(place)}{_PENDING}{time.time_ns()}_{uuid.uuid4().hex}"
    saving = prepare_save(
        os.path.join(gathered, pending), {STATE: state}, overwrite=False, custom_metadata=custom_metadata
    )
    return begin(f"partial save of {place!r}", _SavingPart(gathered, saving))


@final
@dataclass(frozen=True, slots=True)
class _SavingPart:
    """Saves one part. Meanwhile the parts are held, together with others who save one."""

    gathered: str
    saving: Saving

    async def __call__(self, operation: Operation[None]) -> None:
        store, threads = LocalStore(), Threads(1)
        await threads.run(store.make_directory, self.gathered)
        held = await threads.run(hold_with_readers, store, self.gathered)
        try:
            await self.saving(operation)
        finally:
            held.release()


def _check_new(gathered: str, state: PyTreeOf) -> None:
    """Refuse leaves that are in an earlier part, or above or below a leaf of one.

    Raises:
        PartialSaveReplacementError: If there is such a leaf.
    """
    known: set[KeyPath] = set()
    for directory in _parts(gathered):
        tree = read_tree(os.path.join(directory, STATE))
        known.update(
            [keys for keys, spec in zip(tree.keys, tree.specs, strict=True) if not spec.is_empty_marker]
        )

    above = {keys[:n] for keys in known for n in range(len(keys))}
    for leaf in flatten_tree(state)[0]:
        keys = leaf.info.keys
        if is_empty(leaf.value):
            continue
        if keys in known or keys in above or any(keys[:n] in known for n in range(len(keys))):
            raise PartialSaveReplacementError(
                f"{leaf.info.key_path} was found in an earlier partial save. Partial saving currently does "
                "not support REPLACEMENT."
            )


def _parts(gathered: str) -> Sequence[str]:
    """Return the directories of all parts, in the order in which they were begun."""
    store = LocalStore()
    if store.kind(gathered) != "directory":
        return []

    found = [name for name in store.list_directory(gathered) if _is_part(name)]
    return [os.path.join(gathered, name) for name in sorted(found, key=lambda name: name.split("_")[-2:])]


def _is_part(name: str) -> bool:
    _, pending, rest = name.rpartition(_PENDING)
    return bool(pending) and "." not in rest  # or it is one that was interrupted


@final
@dataclass(frozen=True, slots=True)
class _Finalizing:
    """Maps all parts into memory, without copying them, and saves them as one tree."""

    path: str
    context: Context

    async def __call__(self, operation: Operation[None]) -> None:
        store, gathered = LocalStore(), self.path + PARTIAL_SUFFIX
        if await to_thread.run_sync(os.path.exists, self.path):
            raise FileExistsError(f"Finalized checkpoint already exists at {self.path}.")
        if not await to_thread.run_sync(os.path.isdir, gathered):
            raise FileNotFoundError(f"Partial save path {gathered} does not exist.")

        held = await to_thread.run_sync(hold_alone, store, gathered)  # or a part is being saved
        try:
            await self._finalize(operation, store, gathered)
        finally:
            held.release()

    async def _finalize(self, operation: Operation[None], store: LocalStore, gathered: str) -> None:
        parts = await to_thread.run_sync(_parts, gathered)
        if not parts:
            await to_thread.run_sync(store.publish, store.begin_build(self.path, gathered))
            return

        about = [await to_thread.run_sync(_about, store, part) for part in parts]
        custom = {key: value for one in about for key, value in (one.custom_metadata or {}).items()}
        context = await to_thread.run_sync(self._as_saved, parts[0])
        tree = await self._merged(parts)
        handlers = {STATE: PyTreeHandler(context=context)}
        saving = Saving(self.path, {STATE: tree}, handlers, context, False, custom)
        del tree
        await saving(operation)
        await to_thread.run_sync(store.remove_tree, gathered)

    async def _merged(self, parts: Sequence[str]) -> Any:
        async with Checkpointer(memory_limit=self.context.memory.read_concurrent_bytes) as checkpointer:
            trees = [
                await checkpointer.restore(os.path.join(part, STATE), mmap=True, verify=True)
                for part in parts
            ]

        try:
            return merge_trees(*trees)
        except ValueError as error:
            raise PartialSaveReplacementError(
                f"{error}. Partial saving currently does not support REPLACEMENT."
            ) from error

    def _as_saved(self, part: str) -> Context:
        """Return a context with the format of the first part."""
        recorded = json.loads(sealed_documents(LocalStore(), os.path.join(part, STATE)).read(METADATA))
        context = Context(self.context)
        saving = context.array.saving
        saving.use_ocdbt = recorded.get("use_ocdbt", saving.use_ocdbt)
        saving.use_zarr3 = recorded.get("use_zarr3", saving.use_zarr3)
        return context


def _about(store: LocalStore, part: str) -> CheckpointMetadata:
    names = store.list_directory(part)
    return SealedDocuments.open(store, part, names).about(names)
