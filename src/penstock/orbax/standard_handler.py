"""Trees that contain only arrays and numbers; and the `RestoreArgs` that follow from a target."""

from __future__ import annotations

__all__ = ("StandardCheckpointHandler", "StandardRestoreArgs", "StandardSaveArgs", "construct_restore_args")

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import jax
import numpy as np
from jax import tree_util

from penstock.embedding import prng_keys
from penstock.orbax.arrays import key_data, number_type, placement_of
from penstock.orbax.base_pytree_handler import BasePyTreeCheckpointHandler, TreeHandler
from penstock.orbax.checkpoint_args import (
    CheckpointArgs,
    register_with_handler,
    wait_for_all,
)
from penstock.orbax.future import Future
from penstock.orbax.leaf_args import ArrayRestoreArgs, RestoreArgs
from penstock.orbax.metadata import TreeMetadata, build_default_tree_metadata
from penstock.orbax.options import MultiprocessingOptions, PyTreeMetadataOptions
from penstock.orbax.pytree_handler import PyTreeCheckpointHandler, PyTreeRestoreArgs, PyTreeSaveArgs
from penstock.orbax.tree import PyTree, to_flat_dict, tuple_path_from_keypath
from penstock.orbax.type_handlers import PLACEHOLDER
from penstock.orbax.value_metadata import ArrayMetadata, Metadata, ScalarMetadata, StringMetadata

_jax: Any = jax

STANDARD_ARRAY_TYPES = (int, float, np.ndarray, jax.Array)

_tree: Any = tree_util  # jax declares no types for it


class StandardCheckpointHandler(TreeHandler):
    """Saves and restores trees of arrays and numbers. Use it through a `Checkpointer`.

    Args:
        save_concurrent_gb: Gigabytes of host memory that saves may hold.
        restore_concurrent_gb: Likewise for restores.
        multiprocessing_options: Which processes save.
        pytree_metadata_options: How structure is recorded.
        use_ocdbt: Whether all arrays are in one OCDBT database.
    """

    _ORBAX_NAME = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
    _DURABLE = True
    _SAVES_TOGETHER = True
    _BLOCKS = True

    def __init__(
        self,
        *,
        save_concurrent_gb: int = 96,
        restore_concurrent_gb: int = 96,
        multiprocessing_options: MultiprocessingOptions = MultiprocessingOptions(),
        pytree_metadata_options: PyTreeMetadataOptions = PyTreeMetadataOptions(),
        use_ocdbt: bool = True,
    ) -> None:
        self._supported_types = STANDARD_ARRAY_TYPES
        self._impl = PyTreeCheckpointHandler(
            # Orbax's default exceeds the memory of most machines: use what this one can spare instead.
            save_concurrent_gb=None if save_concurrent_gb == 96 else save_concurrent_gb,
            restore_concurrent_gb=None if restore_concurrent_gb == 96 else restore_concurrent_gb,
            multiprocessing_options=multiprocessing_options,
            pytree_metadata_options=pytree_metadata_options,
            use_ocdbt=use_ocdbt,
        )

    async def async_save(
        self,
        directory: Any,
        item: Any = None,
        save_args: Any = None,
        args: StandardSaveArgs | None = None,
    ) -> Sequence[Future] | None:
        """Copy a tree and begin to write it; see `PyTreeCheckpointHandler`.

        Raises:
            ValueError: If there is nothing to save, if the item is a single array, or if it has leaves
                other than arrays and numbers.
        """
        if isinstance(item, CheckpointArgs):
            raise ValueError("Make sure to specify kwarg name `args=` when providing `StandardSaveArgs`.")
        if args is None:
            args = StandardSaveArgs(item, save_args)

        return await self._impl.async_save(
            directory,
            args=PyTreeSaveArgs(self.checked(args), args.save_args, custom_metadata=args.custom_metadata),
        )

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write a tree; return when it is durable. See `async_save`."""
        wait_for_all(self, directory, *args, **kwargs)

    def restore(self, directory: Any, item: Any = None, args: StandardRestoreArgs | None = None) -> Any:
        """Return the tree in a directory.

        Args:
            directory: That was saved to.
            item: See `StandardRestoreArgs`; counts if there are no `args`.
            args: What to restore, and how.

        Raises:
            FileNotFoundError: If there is nothing.
            ValueError: If the item has leaves of other types, or does not fit what is stored.
        """
        if isinstance(item, CheckpointArgs):
            raise ValueError("Make sure to specify kwarg name `args=` when providing `StandardRestoreArgs`.")

        args = args or StandardRestoreArgs(item=item)
        if args.item is not None:
            self._validate_restore_state(args.item)

        restore_args = _restore_args(args, _Stored(self, directory))
        return self._impl.restore(directory, args=PyTreeRestoreArgs(args.item, restore_args))

    def metadata(self, directory: Any) -> TreeMetadata:
        """Return what is known of each leaf; see `PyTreeCheckpointHandler`."""
        return self._impl.metadata(directory)

    @property
    def base(self) -> BasePyTreeCheckpointHandler:
        return self._impl.base

    def checked(self, args: StandardSaveArgs) -> Any:
        """Return the tree to save, with what is like an array as one.

        Raises:
            ValueError: If it has leaves other than arrays and numbers.
        """
        return self._validate_save_state(args.item, args.save_args)

    def _validate_save_state(self, item: Any, save_args: Any = None) -> Any:
        if item is None:
            raise ValueError("Must provide item to save.")
        if isinstance(item, jax.Array | numbers.Number):
            raise ValueError(
                "StandardCheckpointHandler / StandardSave does not support single arrays or scalars. "
                "Use ArrayCheckpointHandler / ArraySave"
            )

        for keys, asked in to_flat_dict(save_args).items() if save_args is not None else ():
            if getattr(asked, "aggregate", False):
                raise ValueError(f"Unsupported option `aggregate` for key: {keys}.")

        def as_array(leaf: Any) -> Any:
            if not isinstance(leaf, np.ndarray | jax.Array) and hasattr(leaf, "__array__"):
                return np.asarray(leaf)

            return cast("Any", leaf)

        def check(path: Any, leaf: Any) -> Any:
            found = as_array(leaf)
            self._check_type(path, found, self._supported_types)
            return found

        # One leaf of each type, since with its path a leaf takes ten times as long.
        leaves: list[object] = jax.tree.leaves(item)
        firsts = {type(leaf): leaf for leaf in leaves}.values()
        if all(isinstance(leaf, self._supported_types) and as_array(leaf) is leaf for leaf in firsts):
            return item

        return _tree.tree_map_with_path(check, item)

    def _validate_restore_state(self, item: Any) -> None:
        allowed = (*self._supported_types, jax.ShapeDtypeStruct, ArrayMetadata)
        for path, leaf in _tree.tree_flatten_with_path(item)[0]:
            self._check_type(path, leaf, allowed)

    def _check_type(self, path: Any, leaf: Any, allowed: tuple[type, ...]) -> None:
        if not isinstance(leaf, allowed):
            raise ValueError(f"Unsupported type: {type(leaf)} for key: {tuple_path_from_keypath(path)}.")


@register_with_handler(StandardCheckpointHandler, for_save=True)
@dataclass
class StandardSaveArgs(CheckpointArgs):
    """The object of a save, and its options.

    Attributes:
        item: A tree of arrays and numbers.
        save_args: A tree of `SaveArgs` like it; None, for a leaf or for all, means the defaults.
        custom_metadata: JSON kept with the tree.

    Raises:
        ValueError: If the item is a `TreeMetadata`.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.item, TreeMetadata):
            raise ValueError("Cannot save TreeMetadata.")


@register_with_handler(StandardCheckpointHandler, for_restore=True)
@dataclass
class StandardRestoreArgs(CheckpointArgs):
    """The target of a restore, and its options.

    Attributes:
        item: A tree like the result: of arrays and numbers, whose types, dtypes, shapes and shardings the
            result has; of `jax.ShapeDtypeStruct`s; or a `TreeMetadata`. By default everything is restored as
            saved, in dicts and lists.
        strict: Whether a shape other than the stored one is an error. If not, arrays are padded with
            zeros or truncated.
        support_layout: Whether the memory layouts of the item's arrays count, too.
        fallback_sharding: Of arrays saved on devices that this process does not have.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.item, TreeMetadata):
            self.item = self.item.tree


class _Stored:
    """The stored tree, read on first use."""

    def __init__(self, handler: StandardCheckpointHandler, directory: Any) -> None:
        self._handler = handler
        self._directory = directory

    @cached_property
    def tree(self) -> Any:
        return self._handler.metadata(self._directory).tree

    @cached_property
    def leaves(self) -> dict[Any, Any]:
        return to_flat_dict(self.tree, is_leaf=lambda node: isinstance(node, ArrayMetadata))


_DESCRIBED: Final = (Metadata, jax.Array, jax.ShapeDtypeStruct, np.ndarray)


def _restore_args(args: StandardRestoreArgs, stored: _Stored) -> Any:
    """Return how each leaf is restored: as in the item, or else as stored."""

    def ask(path: Any, leaf: Any) -> RestoreArgs:
        if not isinstance(leaf, _DESCRIBED):
            return RestoreArgs(restore_type=type(leaf))

        place = None
        if isinstance(leaf, ArrayMetadata):
            place = _recorded(leaf, args.fallback_sharding)
        elif isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            place = placement_of(leaf, args.support_layout)
            if place is None:
                place = _recorded(_find(path, stored), args.fallback_sharding)

        return _args_like(leaf, place, strict=args.strict)

    def is_metadata(node: object) -> bool:
        return isinstance(node, ArrayMetadata)

    item = stored.tree if args.item is None else args.item
    return _tree.tree_map_with_path(ask, item, is_leaf=is_metadata)


def _find(path: Any, stored: _Stored) -> Any:
    keys = tuple_path_from_keypath(path)
    if keys not in stored.leaves:
        raise ValueError(
            f"Structure mismatch: Target path {keys} not found in metadata_tree: {list(stored.leaves)}"
        )

    return stored.leaves[keys]


def _recorded(leaf: Any, fallback: Any) -> Any:
    """The sharding that an array was saved with, over devices of this process."""
    recorded = getattr(leaf, "sharding", None)
    if recorded is None:
        return None
    try:
        return recorded.to_jax_sharding()
    except ValueError as error:
        if fallback is not None:
            return fallback
        raise ValueError(
            "Topology mismatch detected: the checkpoint was saved on other devices than are here; give a "
            "target tree, or a fallback_sharding"
        ) from error


def construct_restore_args(
    target: PyTree,
    sharding_tree: PyTree | None = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> PyTree:
    """Return the `RestoreArgs` that restore each leaf like that of `target`.

    Args:
        target: Of values, `jax.ShapeDtypeStruct`s or `Metadata`; a `TreeMetadata`, too.
        sharding_tree: A tree of the same structure with the shardings of the result; by default those of
            `target`.
        set_global_shape: Whether arrays must have the shape they have in `target`.
        support_layout: Whether arrays are to be laid out in memory as they are in `target`.
        strict: Whether a different shape is an error. If not, arrays are padded with zeros or truncated.

    Returns:
        A tree of the same structure, of `RestoreArgs`.

    Raises:
        ValueError: If a leaf has a type that cannot be restored.
    """

    def args_of(value: Any, sharding: Any) -> RestoreArgs:
        return _args_like(value, sharding, set_global_shape=set_global_shape, strict=strict)

    tree = target.tree if isinstance(target, TreeMetadata) else target
    tree = _jax.tree.map(key_data, tree)
    if sharding_tree is None:
        # Not its own tree: None in it would be no leaf.
        def own(value: Any) -> RestoreArgs:
            return args_of(value, placement_of(value, support_layout))

        found = _jax.tree.map(own, tree)
    else:
        places = sharding_tree.tree if isinstance(sharding_tree, TreeMetadata) else sharding_tree
        found = _jax.tree.map(args_of, tree, places)
    if isinstance(target, TreeMetadata):
        return build_default_tree_metadata(found, custom_metadata=target.custom_metadata)

    return found


def _args_like(value: Any, sharding: Any, *, set_global_shape: bool = True, strict: bool) -> RestoreArgs:
    match value:
        case StringMetadata() | str():
            return RestoreArgs(restore_type=str)
        case ScalarMetadata():
            return RestoreArgs(number_type(value.dtype), value.dtype)
        case ArrayMetadata() | jax.ShapeDtypeStruct() if sharding is None:
            return RestoreArgs(restore_type=np.ndarray, dtype=value.dtype)
        case ArrayMetadata() | jax.ShapeDtypeStruct() | jax.Array():
            shape = value.shape if set_global_shape and not prng_keys.is_key(value.dtype) else None
            return ArrayRestoreArgs(dtype=value.dtype, sharding=sharding, global_shape=shape, strict=strict)
        case np.ndarray():
            array = cast("Any", value)
            return RestoreArgs(restore_type=type(array), dtype=array.dtype)
        case int() | float():
            return RestoreArgs(restore_type=type(value))
        case _ if value is PLACEHOLDER:
            return RestoreArgs(restore_type=type(PLACEHOLDER))
        case Metadata():
            raise ValueError(f"a leaf described by {type(value)} cannot be restored")
        case _:
            raise ValueError(f"a leaf of type {type(value)} cannot be restored")
