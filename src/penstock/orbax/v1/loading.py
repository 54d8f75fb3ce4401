"""Loading one tree or named objects, and describing what can be loaded; of safetensors, too."""

from __future__ import annotations

__all__ = (
    "checkpointables_metadata",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "pytree_metadata",
)

import os
import warnings
from collections.abc import Awaitable
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from anyio import to_thread
from jax import sharding
from jax.sharding import AbstractMesh, NamedSharding

from penstock import Checkpointer, Config, kernel
from penstock.embedding import RestoreOptions, dtypes, failures, paths
from penstock.errors import ChecksumError, MissingFileError, StructureMismatchError
from penstock.orbax.v1.errors import InvalidLayoutError
from penstock.orbax.v1.handler_registration import (
    AUTO,
    METRICS,
    AbstractCheckpointable,
    Checkpointable,
    NoEntryError,
    check_item_names,
    check_one_name,
    handler_for_load,
)
from penstock.orbax.v1.locating import (
    Kind,
    PyTreeMetadata,
    Survey,
    find,
    item_names,
    tree_name,
)
from penstock.orbax.v1.operation import (
    AsyncResponse,
    BackgroundOperation,
    begin,
    give_up,
    share_loop,
    wait_for,
)
from penstock.orbax.v1.options import Context, SafetensorsOptions, get_context
from penstock.orbax.v1.path import Path, PathLike
from penstock.orbax.v1.pytree_handler import mismatch
from penstock.orbax.v1.step_formats import CheckpointMetadata
from penstock.orbax.v1.tree import PyTreeOf, is_supported_abstract_leaf

_sharding: Any = sharding

Abstract: TypeAlias = Any

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
        if found.kind is Kind.SAFETENSORS:
            return await safetensors_metadata(found, _path(found))

        name = await to_thread.run_sync(tree_name, found, checkpointable_name)
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
        if found.kind is Kind.SAFETENSORS:
            return await load_safetensors(found, abstract)

        name = await to_thread.run_sync(tree_name, found, checkpointable_name)
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


async def _load_each(found: Survey, asked: dict[str, Any]) -> dict[str, Any]:
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


def _find(path: PathLike, context: Context) -> Survey:
    return find(path, context.checkpoint_layout, marked=context.atomicity.needs_mark)


def _find_items(path: PathLike, context: Context) -> tuple[Survey, list[str]]:
    found = _find(path, context)
    if found.kind is Kind.SAFETENSORS:
        raise NotImplementedError("safetensors hold one tree and no named checkpointables: use `load`")
    if found.kind is Kind.V0 and (isinstance(found.about.item_handlers, str) or found.is_tree(None)):
        raise InvalidLayoutError(f"{found.path} is a tree and has no named checkpointables: use `load`")

    return found, item_names(found)


def _about(found: Survey, described: Any) -> CheckpointMetadata[Any]:
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


def _path(found: Survey, name: str | None = None) -> Path:
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


async def load_safetensors(found: Survey, abstract: Any) -> Any:
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


async def safetensors_metadata(found: Survey, path: Path) -> CheckpointMetadata[Any]:
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
