"""Arguments of single leaves: where they are, and how they are saved and restored.

Plain data under Orbax's names, for type handlers.
"""

from __future__ import annotations

__all__ = (
    "ArrayRestoreArgs",
    "IsPrioritizedKeyFn",
    "ParamInfo",
    "PathAwaitingCreation",
    "RestoreArgs",
    "SaveArgs",
    "SingleReplicaArrayRestoreArgs",
    "TransferPriority",
    "check_input_arguments",
    "items_first",
    "leaves_first",
)

import copy
import enum
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol, cast, runtime_checkable

import jax
from jax import tree_util

from penstock import kernel
from penstock.embedding import flattening
from penstock.orbax.installation import Counterpart

_tree: Any = tree_util  # jax declares no types for it


class TransferPriority(enum.Enum):
    """The time at which an array is brought to the host, among those of one save."""

    SYNCHRONOUS = 0  #: before the saving call returns; then the array may change
    ASYNCHRONOUS_PRIORITIZED = 1  #: in the background, before the others
    ASYNCHRONOUS_DEPRIORITIZED = 2  #: in the background, after the others
    UNKNOWN = 3


class IsPrioritizedKeyFn(Protocol):
    """Decides from a key path of `jax.tree_util` when its array is brought to the host."""

    def __call__(self, keypath: tuple[Any, ...]) -> TransferPriority: ...


@runtime_checkable
class PathAwaitingCreation(Protocol):
    """A path that is still being created; any object with these methods."""

    async def await_creation(self) -> Any: ...


class ParamInfo:
    """The place of one leaf and the form that it is stored in; made by the caller of a type handler.

    `parent_dir` may be a path that is still being created: then it and `path` can be read only
    after `await_path_creation()`.

    Args:
        name: The stored name of the leaf: its keys joined by dots.
        parent_dir: The directory of the tree. Handlers with files of their own put them there.
        path: By default `parent_dir / name`.
        keypath: The keys of the leaf, as `jax.tree_util` has them.
        skip_deserialize: Whether the leaf is not read.
        byte_limiter: Bounds the bytes that are read or written at once: what has `reserved_bytes`.
        device_host_byte_limiter: Likewise for copies from device to host.
        is_ocdbt_checkpoint: Whether arrays are in one OCDBT database, or each in its own directory.
        use_compression: Whether chunks are compressed.
        use_zarr3: Whether arrays are of zarr version 3; else 2.
        ocdbt_target_data_file_size: Bytes after which a data file is followed by another; 0: never.
        ts_context: The TensorStore context to share; None for one that penstock makes for the call.
        value_typestr: What `_METADATA` calls the leaf's type.
        enable_pinned_host_transfer: Whether accelerators copy through pinned host memory first.
        raise_array_data_missing_error: Whether a missing chunk is an error; else it reads as zeros.
        write_shape: The shape of the part of the array that one replica writes.
        is_prioritized_key_fn: Decides when the leaf is copied to the host.
    """

    def __init__(
        self,
        *,
        name: str,
        parent_dir: Any,
        path: Any = None,
        keypath: tuple[Any, ...] | None = None,
        skip_deserialize: bool | None = None,
        byte_limiter: Any = None,
        device_host_byte_limiter: Any = None,
        is_ocdbt_checkpoint: bool | None = None,
        use_compression: bool | None = True,
        use_zarr3: bool | None = False,
        ocdbt_target_data_file_size: int | None = None,
        ts_context: Any = None,
        value_typestr: str | None = None,
        enable_pinned_host_transfer: bool = False,
        raise_array_data_missing_error: bool = True,
        write_shape: tuple[int, ...] | None = None,
        is_prioritized_key_fn: IsPrioritizedKeyFn | None = None,
    ) -> None:
        self.name = name
        self._parent_dir = parent_dir
        self._path = parent_dir / name if path is None else path
        self.keypath = keypath
        self.skip_deserialize = skip_deserialize
        self.byte_limiter = byte_limiter
        self.device_host_byte_limiter = device_host_byte_limiter
        self.is_ocdbt_checkpoint = is_ocdbt_checkpoint
        self.use_compression = use_compression
        self.use_zarr3 = use_zarr3
        self.ocdbt_target_data_file_size = ocdbt_target_data_file_size
        self.ts_context = ts_context
        self.value_typestr = value_typestr
        self.enable_pinned_host_transfer = enable_pinned_host_transfer
        self.raise_array_data_missing_error = raise_array_data_missing_error
        self.write_shape = write_shape
        self.is_prioritized_key_fn = is_prioritized_key_fn

    def __repr__(self) -> str:
        return f"ParamInfo(name={self.name!r}, parent_dir={str(self._parent_dir)!r})"

    @property
    def parent_dir(self) -> Any:
        """The directory of the tree.

        Raises:
            ValueError: If it is still being created.
        """
        return _created(self._parent_dir, "parent_dir")

    @parent_dir.setter
    def parent_dir(self, value: Any) -> None:
        self._parent_dir = value

    @property
    def path(self) -> Any:
        """The path of the leaf: `parent_dir / name`, unless it was given.

        Raises:
            ValueError: If it is still being created.
        """
        return _created(self._path, "path")

    @path.setter
    def path(self, value: Any) -> None:
        self._path = value

    def replace(self, **kwargs: Any) -> ParamInfo:
        """Return a copy with some attributes replaced."""
        changed = copy.copy(self)
        for name, value in kwargs.items():
            setattr(changed, name, value)

        return changed

    async def await_path_creation(self) -> None:
        """Wait until the directory exists; then the paths can be read."""
        if _is_awaiting(self._parent_dir):
            directory = await self._parent_dir.await_creation()
            self._parent_dir, self._path = directory, directory / self.name


@dataclass
class SaveArgs(Counterpart):
    """The options of a save for one leaf.

    Attributes:
        aggregate: Has no effect, as in Orbax since 0.5; that is logged.
        dtype: What the elements are cast to, as in C; the original dtype is not recorded.
        chunk_byte_size: Bytes of a chunk, at most.
        shard_axes: Axes that are cut first.
    """

    _ORBAX_CLASS = ("", "SaveArgs")

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.aggregate:
            kernel.get_logger().warning(
                "orbax.ignored", option="aggregate", why="every leaf is stored on its own"
            )


@dataclass
class RestoreArgs(Counterpart):
    """The options of a restore for one leaf.

    Attributes:
        restore_type: The type of the result; by default the saved type.
        dtype: What the elements are cast to, as in C.
    """

    _ORBAX_CLASS = ("", "RestoreArgs")

    restore_type: Any = None
    dtype: Any = None


@dataclass
class ArrayRestoreArgs(RestoreArgs):
    """The options of a restore for one leaf, as a jax.Array.

    Attributes:
        restore_type: See `RestoreArgs`.
        dtype: See `RestoreArgs`.
        mesh: With `mesh_axes`, the sharding of the result, whatever `sharding` is. Alone it does not count.
        mesh_axes: A `PartitionSpec` over the axes of `mesh`.
        sharding: The sharding of the result. One of jax, a `ShardingMetadata`, or a jax `Format` (a sharding
            with a memory layout).
        global_shape: The shape of the result; by default the stored one.
        shape: Another name of `global_shape`; both must agree.
        strict: Whether a shape other than the stored one is an error. If not, the array is padded
            with zeros or truncated at the end of each axis.

    Raises:
        ValueError: If `shape` and `global_shape` differ.
    """

    _ORBAX_CLASS = ("", "ArrayRestoreArgs")

    restore_type: Any = jax.Array
    mesh: jax.sharding.Mesh | None = None
    mesh_axes: jax.sharding.PartitionSpec | None = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if self.shape is None:
            self.shape = self.global_shape
        elif self.global_shape is None:
            self.global_shape = self.shape
        elif self.shape != self.global_shape:
            raise ValueError(f"shape {self.shape} and global_shape {self.global_shape} must match")


@dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """The options of a restore for one leaf whose replicas are read once, and broadcast.

    Attributes:
        single_replica_sharding: Has no effect: it follows from `sharding`; that is logged.
    """

    _ORBAX_CLASS = ("type_handlers", "SingleReplicaArrayRestoreArgs")

    single_replica_sharding: jax.sharding.NamedSharding | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.single_replica_sharding is not None:
            kernel.get_logger().warning(
                "orbax.not_needed", option="single_replica_sharding", instead="sharding"
            )


def check_input_arguments(*args: Sized) -> None:
    """Raise `ValueError` unless all have the same length, other than 0. A single argument is not checked."""
    lengths = {len(arg) for arg in args}
    if 0 in lengths and len(args) > 1:
        raise ValueError("a type handler was called with nothing to do: an input of length 0")
    if len(lengths) > 1:
        raise ValueError(f"the inputs of a type handler differ in length: {[len(arg) for arg in args]}")


def _is_awaiting(path: object) -> bool:
    return not isinstance(path, PurePath) and isinstance(path, PathAwaitingCreation)


def _created(path: object, what: str) -> Any:
    if path is None:
        raise ValueError(f"{what} is None")
    if _is_awaiting(path):
        raise ValueError(f"{what} is still being created: await info.await_path_creation() first")

    return cast("Any", path)


def leaves_first(tree: Any, comes_first: Callable[[tuple[Any, ...]], bool]) -> Callable[[Any], bool]:
    """Return a predicate over stored keys, from one over the key paths of `jax.tree_util`.

    Args:
        tree: The tree that is saved.
        comes_first: Returns whether the leaf at a key path is copied first.
    """
    pairs: Any = _tree.tree_flatten_with_path(tree)[0]
    first = {tuple([flattening.step(entry)[0] for entry in path]) for path, _ in pairs if comes_first(path)}
    return first.__contains__


def items_first(predicates: Mapping[str, Callable[[Any], bool] | None]) -> Callable[[Any], bool] | None:
    """Return one predicate for several items, whose names precede the keys; None if no item has one."""
    if not any(predicates.values()):
        return None

    def is_first(keys: tuple[Any, ...]) -> bool:
        predicate = predicates.get(str(keys[0]))
        return predicate is not None and predicate(keys[1:])

    return is_first
