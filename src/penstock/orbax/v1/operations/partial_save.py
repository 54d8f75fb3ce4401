"""Saving a tree part by part. Nothing is visible at its path until all parts are put together."""

from __future__ import annotations

__all__ = ("finalize", "save", "save_async")

import os
from dataclasses import dataclass
from typing import final

from anyio import to_thread

from penstock.handlers.formats.orbax.file_names import PARTIAL_SUFFIX
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.storage.holds import hold_alone, hold_with_readers
from penstock.kernel.storage.paths import absolute_path
from penstock.kernel.storage.workspace import make_name_durable
from penstock.orbax.v1.common.item_names import STATE
from penstock.orbax.v1.common.operation import AsyncResponse, Operation, begin, finished
from penstock.orbax.v1.common.path_types import PathLike
from penstock.orbax.v1.common.tree_types import JsonType, PyTreeOf
from penstock.orbax.v1.context.context import Context, get_context
from penstock.orbax.v1.operations.joint_parts import JointFinalizing, JointPart
from penstock.orbax.v1.operations.parts import (
    check_new,
    filled_leaves,
    gathered_at,
    new_part_name,
    parts_in,
    saving_of_parts,
)
from penstock.orbax.v1.operations.saving import Saving, check_state, prepare_save, saves_jointly, staged


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
        ValueError: If the part cannot be saved.
        PeerError: If another process of the job saves another part, fails, or does not come.
    """
    return staged(_begin(path, state, custom_metadata))


def finalize(path: PathLike) -> None:
    """Put all parts that were saved for `path` together, and make the checkpoint visible there.

    Raises:
        InUseError: If a part is being saved, or somebody else finalizes. It is an OSError.
        FileExistsError: If something exists at `path`.
        FileNotFoundError: If no part was saved.
        PartialSaveReplacementError: If two parts that were saved at the same time share a leaf.
        PeerError: If another process of the job fails, or does not come.
    """
    place = absolute_path(path)
    if place.endswith(PARTIAL_SUFFIX):
        place = place.removesuffix(PARTIAL_SUFFIX)

    context = get_context()
    main = JointFinalizing(place, context) if saves_jointly(context) else _Finalizing(place, context)
    finished(begin(f"finalize {place!r}", main))


def _begin(path: PathLike, state: PyTreeOf, custom_metadata: JsonType | None) -> Operation[None]:
    place, context = absolute_path(path), get_context()
    jointly = saves_jointly(context)
    if not jointly and os.path.exists(place):
        raise FileExistsError(f"Finalized checkpoint already exists at {place}.")

    check_state(state)
    gathered, leaves = gathered_at(place), filled_leaves(state)
    if not jointly:
        check_new(gathered, leaves)

    part = os.path.join(gathered, new_part_name(place))
    saving = prepare_save(part, {STATE: state}, overwrite=False, custom_metadata=custom_metadata)
    alone = _SavingPart(gathered, saving)
    return begin(
        f"partial save of {place!r}", JointPart(place, leaves, saving, context) if jointly else alone
    )


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


@final
@dataclass(frozen=True, slots=True)
class _Finalizing:
    """Maps all parts into memory, without copying them, and saves them as one tree."""

    path: str
    context: Context

    async def __call__(self, operation: Operation[None]) -> None:
        store, gathered = LocalStore(), gathered_at(self.path)
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
        parts = await to_thread.run_sync(parts_in, gathered)
        if not parts:
            await to_thread.run_sync(store.publish, store.begin_build(self.path, gathered))
            await to_thread.run_sync(make_name_durable, store, self.path)
            return

        saving = await saving_of_parts(self.path, parts, self.context)
        await saving(operation)
        await to_thread.run_sync(store.remove_tree, gathered)
