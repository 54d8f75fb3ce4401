"""Loading one tree or named objects, describing them, and deleting a checkpoint; of safetensors, too.

Each begins with a survey of what is at the path.
"""

from __future__ import annotations

__all__ = (
    "PyTreeMetadata",
    "checkpointables_metadata",
    "delete",
    "delete_async",
    "is_orbax_checkpoint",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "pytree_metadata",
)

import enum
import json
import os
import warnings
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast, final

import jax
import numpy as np
from anyio import to_thread
from jax import sharding
from jax.sharding import AbstractMesh, NamedSharding

from penstock import Checkpointer, Config, kernel
from penstock import handlers as built_in
from penstock.embedding import (
    RestoreOptions,
    checkpoint_metadata,
    deletion,
    document_files,
    dtypes,
    failures,
    file_names,
    find_place,
    paths,
    step_directory,
)
from penstock.errors import (
    ChecksumError,
    MissingFileError,
    PathError,
    StorageError,
    StructureMismatchError,
)
from penstock.orbax.item_files import store_at
from penstock.orbax.v1.errors import InvalidLayoutError
from penstock.orbax.v1.handler_registration import (
    AUTO,
    METRICS,
    RESERVED,
    STATE,
    AbstractCheckpointable,
    Checkpointable,
    NoEntryError,
    check_item_names,
    check_names,
    check_one_name,
    handler_for_load,
)
from penstock.orbax.v1.operation import (
    AsyncResponse,
    BackgroundOperation,
    begin,
    give_up,
    share_loop,
    wait_for,
)
from penstock.orbax.v1.options import CheckpointLayout, Context, SafetensorsOptions, get_context
from penstock.orbax.v1.path import Path, PathLike
from penstock.orbax.v1.pytree_handler import mismatch
from penstock.orbax.v1.step_formats import CheckpointMetadata
from penstock.orbax.v1.tree import PyTreeOf, is_supported_abstract_leaf

_sharding: Any = sharding

Abstract: TypeAlias = Any

PyTreeMetadata: TypeAlias = Any
"""A tree of dicts and lists that holds the metadata of each leaf."""

_jax: Any = jax

_OURS: Final = "penstock."


@failures.short_traceback
def load(
    path: PathLike,
    abstract_state: Abstract | CheckpointMetadata[Any] | None = None,
    *,
    checkpointable_name: str | None = AUTO,
) -> PyTreeOf:
    """Load a tree. Works inside a running event loop, too.

    Args:
        path: The path of a checkpoint.
        abstract_state: The target: a tree whose leaves are values, structs such as
            `jax.ShapeDtypeStruct`, types, None for a leaf as it was saved, or `...` for a leaf that is
            not loaded; or what `metadata` returned. By default everything is loaded as it was saved.
        checkpointable_name: The item that holds the tree; None if the checkpoint itself is the tree. By
            default it is searched for.

    Raises:
        InvalidLayoutError: If no checkpoint is there, or it has no such tree. It is a ValueError.
        TypeError: If a leaf of `abstract_state` is of an unsupported type.
        ValueError: If `abstract_state` does not fit what is stored.
        PenstockError: What `penstock.restore` raises.
    """
    return wait_for(_begin_load(path, abstract_state, checkpointable_name))


@failures.short_traceback
def load_async(
    path: PathLike,
    abstract_state: Abstract | CheckpointMetadata[Any] | None = None,
    *,
    checkpointable_name: str | None = AUTO,
) -> AsyncResponse[PyTreeOf]:
    """Start to load a tree, and return at once. The response raises the errors. See `load`."""
    return _begin_load(path, abstract_state, checkpointable_name)


@failures.short_traceback
def load_checkpointables(
    path: PathLike,
    abstract_checkpointables: (
        dict[str, AbstractCheckpointable] | CheckpointMetadata[dict[str, AbstractCheckpointable]] | None
    ) = None,
) -> dict[str, Checkpointable]:
    """Load named objects.

    Args:
        path: The path of a checkpoint.
        abstract_checkpointables: The target of each item by name, None for as it was saved; or what
            `checkpointables_metadata` returned. Other items are not loaded; by default all are.

    Raises:
        InvalidLayoutError: If no checkpoint with items is there. It is a ValueError.
        KeyError: If an item does not exist, or its handler fails; then that error is the cause.
        PenstockError: What `penstock.restore` raises.
    """
    return wait_for(_begin_load_items(path, abstract_checkpointables))


@failures.short_traceback
def load_checkpointables_async(
    path: PathLike,
    abstract_checkpointables: (
        dict[str, AbstractCheckpointable] | CheckpointMetadata[dict[str, AbstractCheckpointable]] | None
    ) = None,
) -> AsyncResponse[dict[str, Checkpointable]]:
    """Start to load named objects, and return at once. See `load_checkpointables`."""
    return _begin_load_items(path, abstract_checkpointables)


@failures.short_traceback
def metadata(path: PathLike, checkpointable_name: str | None = AUTO) -> CheckpointMetadata[PyTreeMetadata]:
    """Describe the tree in a checkpoint, without reading an array.

    Args:
        path: The path of the checkpoint.
        checkpointable_name: As for `load`.

    Raises:
        InvalidLayoutError: If no checkpoint is there, or it has no such tree. It is a ValueError.
    """
    check_one_name(checkpointable_name)

    async def describe(operation: BackgroundOperation[Any]) -> CheckpointMetadata[Any]:
        found = await to_thread.run_sync(_find, path, get_context())
        if found.kind is _Kind.SAFETENSORS:
            return await _safetensors_metadata(found, _path(found))

        name = await to_thread.run_sync(_tree_name, found, checkpointable_name)
        handler = handler_for_load(_registry(), None, name=name or "", recorded=found.recorded(name))
        return _about(found, await handler.metadata(_path(found, name)))

    return wait_for(begin("metadata", describe))


@failures.short_traceback
def checkpointables_metadata(path: PathLike) -> CheckpointMetadata[dict[str, AbstractCheckpointable]]:
    """Describe the items of a checkpoint. An item whose handler cannot describe it is None.

    Raises:
        InvalidLayoutError: If no checkpoint with items is there. It is a ValueError.
    """

    async def describe(operation: BackgroundOperation[Any]) -> CheckpointMetadata[Any]:
        found, names = await to_thread.run_sync(_find_items, path, get_context())
        described: dict[str, Any] = {}
        for name in names:
            handler = handler_for_load(_registry(), None, name=name, recorded=found.recorded(name))
            try:
                described[name] = await handler.metadata(_path(found, name))
            except Exception as error:
                kernel.get_logger().warning("metadata.item_unknown", item=name, error=repr(error))
                described[name] = None

        return _about(found, described)

    return wait_for(begin("metadata", describe))


def load_pytree(*args: Any, **kwargs: Any) -> PyTreeOf:
    """Do what `load` does. Deprecated: use `load`."""
    warnings.warn("Use `load` instead.", DeprecationWarning, stacklevel=2)
    return load(*args, **kwargs)


def load_pytree_async(*args: Any, **kwargs: Any) -> AsyncResponse[PyTreeOf]:
    """Do what `load_async` does. Deprecated: use `load_async`."""
    warnings.warn("Use `load_async` instead.", DeprecationWarning, stacklevel=2)
    return load_async(*args, **kwargs)


def pytree_metadata(*args: Any, **kwargs: Any) -> CheckpointMetadata[PyTreeMetadata]:
    """Do what `metadata` does. Deprecated: use `metadata`."""
    warnings.warn("Use `metadata` instead.", DeprecationWarning, stacklevel=2)
    return metadata(*args, **kwargs)


def _begin_load(
    path: PathLike, abstract_state: Any, checkpointable_name: str | None
) -> BackgroundOperation[Any]:
    abstract = _plain_abstract(abstract_state)
    check_one_name(checkpointable_name)
    _check_abstract(abstract)
    paths.path_or_url(path)

    async def load_tree(operation: BackgroundOperation[Any]) -> Any:
        found = await to_thread.run_sync(_find, path, get_context())
        if found.kind is _Kind.SAFETENSORS:
            return await _load_safetensors(found, abstract)

        name = await to_thread.run_sync(_tree_name, found, checkpointable_name)
        known_as = name or os.path.basename(found.path)
        handler = handler_for_load(_registry(), abstract, name=known_as, recorded=found.recorded(name))
        async with share_loop():
            return await (await handler.load(_path(found, name), abstract))

    return begin("load", load_tree)


def _begin_load_items(path: PathLike, abstract_checkpointables: Any) -> BackgroundOperation[dict[str, Any]]:
    abstract = _plain_abstract(abstract_checkpointables)
    if abstract is not None:
        check_item_names(abstract, "abstract_checkpointables")

    async def load_items(operation: BackgroundOperation[dict[str, Any]]) -> dict[str, Any]:
        found, names = await to_thread.run_sync(_find_items, path, get_context())
        asked: dict[str, Any] = abstract or dict.fromkeys(names)
        if not asked.keys() <= set(names):
            raise KeyError(
                f"Requested checkpointables: {list(asked)} for loading were not found in the checkpoint. "
                f"Available checkpointables: {names}"
            )

        async with share_loop(len(asked)):
            return await _load_each(found, asked)

    return begin("load", load_items)


async def _load_each(found: _Survey, asked: dict[str, Any]) -> dict[str, Any]:
    registry = _registry()
    loading: dict[str, tuple[Any, Awaitable[Any]]] = {}
    loaded: dict[str, Any] = {}
    try:
        for name, abstract in asked.items():
            handler = handler_for_load(registry, abstract, name=name, recorded=found.recorded(name))
            loading[name] = handler, await handler.load(_path(found, name), abstract)

        for name, (handler, one) in loading.items():
            try:
                loaded[name] = await one
            except (ChecksumError, MissingFileError):
                raise  # it was found, and is damaged
            except Exception as error:
                if not type(handler).__module__.startswith(_OURS):
                    raise  # a handler of the caller's says itself what is wrong

                raise NoEntryError(
                    f"Failed to load checkpointable: {name} with {type(handler)} as {asked[name]!r}: {error}"
                ) from error
    finally:
        give_up(one for _, one in loading.values())

    return loaded


def _find(path: PathLike, context: Context) -> _Survey:
    return _survey(path, context.checkpoint_layout, marked=context.atomicity.needs_mark)


def _find_items(path: PathLike, context: Context) -> tuple[_Survey, list[str]]:
    found = _find(path, context)
    if found.kind is _Kind.SAFETENSORS:
        raise NotImplementedError("safetensors hold one tree and no named checkpointables: use `load`")
    if found.kind is _Kind.V0 and (isinstance(found.about.item_handlers, str) or found.is_tree(None)):
        raise InvalidLayoutError(f"{found.path} is a tree and has no named checkpointables: use `load`")

    return found, _item_names(found)


def _about(found: _Survey, described: Any) -> CheckpointMetadata[Any]:
    if isinstance(described, dict):
        described.pop(METRICS, None)  # pyright: ignore[reportUnknownMemberType]

    about = found.about
    return CheckpointMetadata(
        _path(found),
        metadata=described,  # pyright: ignore[reportUnknownArgumentType]
        init_timestamp_nsecs=about.started_at_ns,
        commit_timestamp_nsecs=about.committed_at_ns,
        custom_metadata=about.custom_metadata,
    )


def _path(found: _Survey, name: str | None = None) -> Path:
    path = get_context().file.path_class(found.path)
    return path if name is None else path / name


def _registry() -> Any:
    return get_context().checkpointables.registry


def _plain_abstract(abstract: Any) -> Any:
    """Unwrap metadata, or replace abstract meshes by the mesh in force."""
    if isinstance(abstract, CheckpointMetadata):
        return abstract.metadata  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if abstract is None:
        return None

    return _jax.tree.map(_with_mesh, abstract)


def _with_mesh(leaf: Any) -> Any:
    sharding = None if isinstance(leaf, type) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return leaf

    struct: Any = leaf
    mesh: Any = _jax.sharding.get_mesh()
    return _jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=NamedSharding(mesh, sharding.spec))


def _check_abstract(abstract: Any) -> None:
    for leaf in _jax.tree.leaves(abstract):
        if not is_supported_abstract_leaf(leaf):
            raise TypeError(
                f"Unsupported abstract leaf type for loading: `{type(leaf)}`. An abstract leaf is a value, a "
                "struct with shape and dtype, or a type of these."
            )


async def _load_safetensors(found: _Survey, abstract: Any) -> Any:
    """Load a flat tree, as NumPy arrays unless asked otherwise; structs without a sharding on all devices."""
    context = get_context()
    like, options = ..., RestoreOptions()
    if abstract is not None:
        like = _jax.tree.map(_with_placement, abstract)
        skips = context.pytree.loading.partial_load
        options = RestoreOptions(dtype="like", on_unexpected="skip" if skips else "raise")

    config, limit = _config(context.safetensors), context.memory.read_concurrent_bytes
    async with Checkpointer(config=config, memory_limit=limit) as checkpointer:
        try:
            return await checkpointer.restore_with(found.path, like, options)
        except StructureMismatchError as error:
            raise mismatch([str(difference) for difference in error.differences]) from error


def _with_placement(leaf: Any) -> Any:
    if not isinstance(leaf, _jax.ShapeDtypeStruct) or leaf.sharding is not None:
        return leaf

    every = _sharding.Mesh(np.asarray(_jax.devices()), ("replica",))
    place = _sharding.NamedSharding(every, _sharding.PartitionSpec())
    return _jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _config(options: SafetensorsOptions) -> Config | None:
    options.check()
    if options.read_chunk_bytes is None:
        return None

    return Config.load().changed({"restore": {"piece_bytes": options.read_chunk_bytes}})


async def _safetensors_metadata(found: _Survey, path: Path) -> CheckpointMetadata[Any]:
    """Say what arrays there are, by name."""
    async with Checkpointer() as checkpointer:
        about = await checkpointer.metadata(found.path)

    tree = {
        leaf.name: _jax.ShapeDtypeStruct(leaf.shape or (), dtypes.numpy_dtype(leaf.dtype))
        for leaf in about.leaves
    }
    return CheckpointMetadata(
        path,
        metadata=tree,
        commit_timestamp_nsecs=os.stat(found.path).st_mtime_ns,
        custom_metadata=about.custom_metadata,
    )


class _Kind(enum.Enum):
    """The kind of a checkpoint."""

    V1 = 1  #: named items, written by the newer API
    V0 = 0  #: named items, or one tree, written by the established one
    SAFETENSORS = 2


@final
@dataclass(frozen=True, slots=True)
class _Survey:
    """A checkpoint, and what it records of itself."""

    path: str
    kind: _Kind
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
        _survey(path, CheckpointLayout.ORBAX)
    except (ChecksumError, MissingFileError):
        return True
    except InvalidLayoutError:
        return False

    return True


def _survey(path: PathLike, layout: CheckpointLayout, *, marked: bool = False) -> _Survey:
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
        found = _survey_of(place, layout)
    except (ChecksumError, MissingFileError):
        raise  # it is of this layout, and damaged
    except (OSError, ValueError) as error:
        raise InvalidLayoutError(
            f"Could not recognize the checkpoint at {place} as a valid {layout.value.capitalize()} "
            "checkpoint. If it is of another layout, say so with `ctx.checkpoint_layout = ...`."
        ) from error

    if marked and found.kind is not _Kind.SAFETENSORS and file_names.COMMIT_MARK not in found.names:
        raise InvalidLayoutError(
            f"Found incomplete checkpoint at {place}: it has no {file_names.COMMIT_MARK}."
        )

    return found


def _tree_name(found: _Survey, name: str | None) -> str | None:
    """Return the name of the item that holds the tree; None if the checkpoint itself is it.

    Args:
        found: The checkpoint.
        name: The name of the item; `AUTO` for `state`, or else the first tree in alphabetical order.

    Raises:
        InvalidLayoutError: If there is no such tree.
    """
    if name == AUTO:
        for candidate in _item_names(found):
            if found.is_tree(candidate):
                return candidate
        if found.kind is _Kind.V0 and found.is_tree(None):
            return None

        raise InvalidLayoutError(f"path={found.path!r} has no PyTree checkpointable that could be loaded")

    if name is None and found.kind is _Kind.V1:
        raise InvalidLayoutError(
            f"{found.path} has named items, as checkpoints of the newer API have: "
            "`checkpointable_name=None` is only for a V0 checkpoint that is itself a tree."
        )
    if not found.is_tree(name):
        trees = [item for item in _item_names(found) if found.is_tree(item)]
        here = " It is itself a tree: load it with checkpointable_name=None." if found.is_tree(None) else ""
        raise InvalidLayoutError(f"{found.path} has no PyTree {name!r}; there are {trees}.{here}")

    return name


def _item_names(found: _Survey) -> list[str]:
    """Return the names of all items: `state` first, the others in alphabetical order."""
    names = [
        name
        for name in found.names
        if name not in RESERVED
        and file_names.TEMPORARY_SUFFIX not in name  # what a deletion left that was interrupted
        and found.store.kind(os.path.join(found.path, name)) == "directory"
    ]
    return sorted(names, key=lambda name: (name != STATE, name))


def _survey_of(path: str, layout: CheckpointLayout) -> _Survey:
    store = store_at(path, snapshot=True)
    place = find_place(store, path)
    names = frozenset(store.list_directory(path)) if store.kind(path) == "directory" else frozenset[str]()
    if layout is not CheckpointLayout.ORBAX and place.kind == "tensors":
        return _Survey(path, _Kind.SAFETENSORS, names, checkpoint_metadata.CheckpointDocument(), store)
    if layout is CheckpointLayout.SAFETENSORS:
        raise ValueError(f"{path} is neither a safetensors file nor a directory with one")
    if file_names.V1_MARK in names and file_names.CHECKPOINT_METADATA not in names:
        raise FileNotFoundError(
            f"Checkpoint path {path} is missing the file {file_names.CHECKPOINT_METADATA!r}."
        )

    kind = _Kind.V1 if file_names.V1_MARK in names else _Kind.V0
    if kind is _Kind.V0:
        parent = os.path.dirname(path)
        if store.kind(os.path.join(parent, file_names.CHECKPOINT_METADATA)) is not None:
            raise ValueError(f"{path} is an item of a checkpoint: load it from {parent}, by its name.")
        if place.steps:
            raise ValueError(f"{path} is a directory of checkpoints, one of which is meant: {place.steps}")
        if place.kind != "checkpoint":
            raise ValueError(f"{path} is not itself a checkpoint: load one that is in it, if any is.")

    return _Survey(path, kind, names, document_files.sealed_documents(store, path).about(names), store)


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
    return wait_for(_begin_deletion(path, checkpointable_name, missing_ok=missing_ok))


def delete_async(
    path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> AsyncResponse[bool]:
    """Begin to delete, and return; what goes wrong is raised by the response. See `delete`."""
    return _begin_deletion(path, checkpointable_name, missing_ok=missing_ok)


def _begin_deletion(path: PathLike, name: str | None, *, missing_ok: bool) -> BackgroundOperation[bool]:
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

    found = _survey(path, CheckpointLayout.AUTO)
    doomed = path
    if name is not None:
        names = _item_names(found)
        doomed = os.path.join(path, name)
        if name not in names:
            return _absent(doomed, missing_ok)
        if names == [name]:
            raise ValueError(f"{name!r} is the only checkpointable of {path}: delete the whole checkpoint")

    if found.kind is _Kind.SAFETENSORS and os.path.isfile(path):
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
