"""Saving a tree part by part: nothing is visible at its path until all parts are put together.

The parts are gathered in a directory next to the path. The primary of a job says whether a part may be saved.
"""

from __future__ import annotations

__all__ = ("finalize", "save", "save_async")

import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

from anyio import fail_after, to_thread

from penstock import Checkpointer, kernel
from penstock import handlers as built_in
from penstock.embedding import (
    act_on_answer,
    checkpoint_metadata,
    document_files,
    file_names,
    flattening,
    make_name_durable,
    paths,
)
from penstock.errors import ConfigError, InUseError
from penstock.orbax.options import is_publisher, job_options, saves_jointly
from penstock.orbax.tree import merge_trees
from penstock.orbax.v1.errors import PartialSaveReplacementError
from penstock.orbax.v1.handler_registration import STATE
from penstock.orbax.v1.operation import AsyncResponse, BackgroundOperation, begin, wait_for
from penstock.orbax.v1.options import Context, get_context
from penstock.orbax.v1.path import PathLike
from penstock.orbax.v1.pytree_handler import PyTreeHandler, read_tree
from penstock.orbax.v1.saving import ItemsSave, check_state, prepare_save, wait_until_staged
from penstock.orbax.v1.tree import JsonType, PyTreeOf

_PENDING: Final = ".pending_"

T = TypeVar("T")

_REFUSALS: Final[Mapping[str, type[Exception]]] = {
    "exists": FileExistsError,
    "absent": FileNotFoundError,
    "in use": InUseError,
    "known": PartialSaveReplacementError,
}
"""The errors that the primary raises for all processes."""


def save(path: PathLike, state: PyTreeOf, *, custom_metadata: JsonType | None = None) -> None:
    """Save a part of a tree, next to `path`; return when it is durable. See `save_async`."""
    wait_for(_begin(path, state, custom_metadata))


def save_async(
    path: PathLike, state: PyTreeOf, *, custom_metadata: JsonType | None = None
) -> AsyncResponse[None]:
    """Start to save a part of a tree, next to `path`; return when the part may be changed.

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
    return wait_until_staged(_begin(path, state, custom_metadata))


def finalize(path: PathLike) -> None:
    """Put all parts that were saved for `path` together, and make the checkpoint visible there.

    Raises:
        InUseError: If a part is being saved, or another finalizes. It is an OSError.
        FileExistsError: If something exists at `path`.
        FileNotFoundError: If no part was saved.
        PartialSaveReplacementError: If two parts that were saved at the same time share a leaf.
        PeerError: If another process of the job fails, or does not come.
    """
    place = paths.absolute_path(path)
    if place.endswith(file_names.PARTIAL_SUFFIX):
        place = place.removesuffix(file_names.PARTIAL_SUFFIX)

    wait_for(begin(f"finalize {place!r}", _Finalization(place, get_context())))


def _begin(path: PathLike, state: PyTreeOf, custom_metadata: JsonType | None) -> BackgroundOperation[None]:
    place, context = paths.absolute_path(path), get_context()
    check_state(state)
    saving = prepare_save(place, {STATE: state}, overwrite=False, custom_metadata=custom_metadata)
    part = _Part(place, filled_leaves(state), saving, context)
    return begin(f"partial save of {place!r}", part)


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """Saves one part. The primary looks whether it may be saved, and chooses its name and place.

    Meanwhile the primary holds the parts, together with others who save one.
    """

    path: str
    leaves: Sequence[kernel.ParamInfo]  #: that no other part may have
    saving: ItemsSave
    context: Context

    async def __call__(self, operation: BackgroundOperation[None]) -> None:
        asked = [f"{leaf.key_path}\tsaved in this part" for leaf in self.leaves]
        question = _Question(f"a part of {self.path}", self.path, asked, self._begin)
        with fail_after(self.context.asynchronous.timeout_secs):
            async with _answered(question, self.context, self._named):
                await self.saving(operation)

    def _begin(self) -> tuple[Sequence[str], kernel.Hold]:
        _check_absent(self.path)
        gathered, store = directory_of_parts(self.path), built_in.LocalStore()
        check_new(gathered, self.leaves)
        store.make_directory(gathered)
        return [new_part_name(self.path)], store.hold_reading(gathered)

    async def _named(self, names: Sequence[str]) -> None:
        self.saving.path = os.path.join(directory_of_parts(self.path), names[0])


@final
@dataclass(frozen=True, slots=True)
class _Finalization:
    """Puts all parts together: each process maps what its devices held, without copying it, and saves that.

    Meanwhile the primary holds the parts alone.
    """

    path: str
    context: Context

    async def __call__(self, operation: BackgroundOperation[None]) -> None:
        question = _Question(f"finalize {self.path}", self.path, (), self._begin)
        with fail_after(self.context.asynchronous.timeout_secs):
            async with _answered(question, self.context, self._read) as saving:
                if saving is None:
                    return

                await saving(operation)
                if is_publisher(self.context.multiprocessing):
                    await to_thread.run_sync(built_in.LocalStore().remove_tree, directory_of_parts(self.path))

    def _begin(self) -> tuple[Sequence[str], kernel.Hold]:
        _check_absent(self.path)
        gathered, store = directory_of_parts(self.path), built_in.LocalStore()
        if not os.path.isdir(gathered):
            raise FileNotFoundError(f"Partial save path {gathered} does not exist.")

        held = store.hold(gathered)  # or a part is being saved
        try:
            names = [os.path.basename(part) for part in parts_in(gathered)]
            if not names:
                store.publish(store.begin_build(self.path, gathered))
                make_name_durable(store, self.path)
        except BaseException:
            held.release()
            raise

        return names, held

    async def _read(self, names: Sequence[str]) -> ItemsSave | None:
        parts = [os.path.join(directory_of_parts(self.path), name) for name in names]
        return await save_of_parts(self.path, parts, self.context) if parts else None


@final
@dataclass(frozen=True, slots=True)
class _Question:
    """A question that all processes of the save ask, and the primary answers. A process alone is that."""

    about: str  #: tells it from other questions
    path: str  #: of the checkpoint
    asked: Sequence[str]  #: see `act_on_answer`
    find_out: Callable[
        [], tuple[Sequence[str], kernel.Hold]
    ]  #: what it found, and what is held meanwhile. Blocking

    def __call__(self, held: list[kernel.Hold], refused: list[Exception]) -> str:
        """Return the primary's answer as text; note what is held, or the error of a refusal."""
        try:
            names, hold = self.find_out()
        except Exception as error:
            for refusal, kind in _REFUSALS.items():
                if isinstance(error, kind):
                    refused.append(error)
                    text = error.path if isinstance(error, InUseError) else str(error)
                    return json.dumps([refusal, [text]])

            raise

        held.append(hold)
        return json.dumps(["", names])


@asynccontextmanager
async def _answered(
    question: _Question, context: Context, act: Callable[[Sequence[str]], Awaitable[T]]
) -> AsyncGenerator[T]:
    """Yield the result of `act` for the primary's answer, called in all processes.

    Raises:
        OSError, PartialSaveReplacementError: In all processes, what the primary refuses.
        PeerError: If another process asks something else, failed, or does not come.
        ConfigError: If each process has its own disk there.
    """
    held, own = list[kernel.Hold](), list[Exception]()
    found: list[T] = []

    async def answer() -> str:
        return await to_thread.run_sync(question, held, own)

    async def act_unless_refused(said: str) -> Exception | None:
        refusal, answer = json.loads(said)
        if refusal:
            return own[0] if own else _REFUSALS[refusal](*answer)

        found.append(await act(answer))
        return None

    processes = context.multiprocessing
    jointly = saves_jointly(processes, None, context.file.path_permission_mode)
    by = Checkpointer(
        coordinator=None if jointly else kernel.SingleProcessCoordinator(),
        job=job_options(processes) if jointly else None,
    )
    try:
        async with by as checkpointer:
            engine = checkpointer.engine
            if engine.is_local(question.path):
                raise ConfigError(
                    "job.local_root", "parts are gathered in a directory that all processes see"
                )

            operation = engine.coordinator.operation(question.about)
            refused = await act_on_answer(operation, question.asked, answer, act_unless_refused)

        if refused is not None:
            raise refused

        yield found[0]
    finally:
        for hold in held:
            hold.release()


def _check_absent(path: str) -> None:
    if os.path.exists(path):
        raise FileExistsError(f"Finalized checkpoint already exists at {path}.")


def directory_of_parts(path: str) -> str:
    """Return the directory of the parts of the checkpoint at `path`."""
    return path + file_names.PARTIAL_SUFFIX


def new_part_name(path: str) -> str:
    """Return a name for a part of the checkpoint at `path`, which tells it and when it was begun."""
    return f"{os.path.basename(path)}{_PENDING}{time.time_ns()}_{uuid.uuid4().hex}"


def parts_in(gathered: str) -> Sequence[str]:
    """Return the directories of all parts, in the order in which they were begun. Blocking."""
    store = built_in.LocalStore()
    if store.kind(gathered) != "directory":
        return []

    found = [name for name in store.list_directory(gathered) if _is_part(name)]
    return [os.path.join(gathered, name) for name in sorted(found, key=lambda name: name.split("_")[-2:])]


def _is_part(name: str) -> bool:
    _, pending, rest = name.rpartition(_PENDING)
    return bool(pending) and "." not in rest  # or it is one that was interrupted


def filled_leaves(state: Any) -> Sequence[kernel.ParamInfo]:
    """Return the leaves of a part that no other part may have: those that are not empty."""
    return [leaf.info for leaf in flattening.flatten_tree(state)[0] if not flattening.is_empty(leaf.value)]


def check_new(gathered: str, leaves: Sequence[kernel.ParamInfo]) -> None:
    """Refuse leaves that are in an earlier part, or above or below a leaf of one. Blocking.

    Args:
        gathered: The directory of the parts.
        leaves: Of the new part, see `filled_leaves`.

    Raises:
        PartialSaveReplacementError: If there is such a leaf.
    """
    known: set[kernel.KeyPath] = set()
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


async def save_of_parts(path: str, parts: Sequence[str], context: Context) -> ItemsSave:
    """Return the save of all parts as one tree, mapped into memory and compared with their checksums.

    Raises:
        PartialSaveReplacementError: If two of them share a leaf.
    """
    store = built_in.LocalStore()
    about = [await to_thread.run_sync(_about, store, part) for part in parts]
    custom = {key: value for one in about for key, value in (one.custom_metadata or {}).items()}
    context = await to_thread.run_sync(_as_saved, context, parts[0])
    tree = await _merged(parts, context.memory.read_concurrent_bytes)
    return ItemsSave(path, {STATE: tree}, {STATE: PyTreeHandler(context=context)}, context, False, custom)


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
    recorded = json.loads(
        document_files.sealed_documents(built_in.LocalStore(), os.path.join(part, STATE)).read(
            file_names.METADATA
        )
    )
    found = Context(context)
    saving = found.array.saving
    saving.use_ocdbt = recorded.get("use_ocdbt", saving.use_ocdbt)
    saving.use_zarr3 = recorded.get("use_zarr3", saving.use_zarr3)
    return found


def _about(store: built_in.LocalStore, part: str) -> checkpoint_metadata.CheckpointDocument:
    names = store.list_directory(part)
    return document_files.sealed_documents(store, part).about(names)
