"""What a target says of how each leaf is restored, and structs that stand for arrays."""

from __future__ import annotations

__all__ = ("construct_restore_args", "to_shape_dtype_struct")

from typing import Any, Final, cast

import jax
import numpy as np

from penstock.handlers.leaves.jax_arrays.prng_keys import is_key
from penstock.orbax.common.leaf_args import ArrayRestoreArgs, RestoreArgs
from penstock.orbax.common.sharding_metadata import ShardingMetadata
from penstock.orbax.common.value_metadata import ArrayMetadata, Metadata, ScalarMetadata, StringMetadata
from penstock.orbax.v0.common.stored_tree_metadata import TreeMetadata, build_default_tree_metadata
from penstock.orbax.v0.common.tree_utils import PyTree
from penstock.orbax.v0.leaf_handlers.type_handler_registry import PLACEHOLDER

_jax: Any = jax
_PYTHON: Final = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def construct_restore_args(
    target: PyTree,
    sharding_tree: PyTree | None = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> PyTree:
    """Say how each leaf is to be restored so that it is like that of `target`.

    Args:
        target: Of values, `jax.ShapeDtypeStruct`s or `Metadata`; a `TreeMetadata`, too.
        sharding_tree: A tree of the same structure with the shardings of the result; by default those of
            `target`.
        set_global_shape: Whether arrays must have the shape they have in `target`.
        support_layout: Whether arrays are to be laid out in memory as they are in `target`.
        strict: Whether another shape is an error. If not, arrays are padded with zeros or cut off.

    Returns:
        A tree of the same structure, of `RestoreArgs`.

    Raises:
        ValueError: If a leaf is of a type that nobody restores.
    """

    def args_of(value: Any, sharding: Any) -> RestoreArgs:
        return _restore_args(value, sharding, set_global_shape=set_global_shape, strict=strict)

    tree = target.tree if isinstance(target, TreeMetadata) else target
    tree = _jax.tree.map(_key_data, tree)
    if sharding_tree is None:
        # Not a tree of its own: None in it would be no leaf.
        def own(value: Any) -> RestoreArgs:
            return args_of(value, _place(value, support_layout))

        found = _jax.tree.map(own, tree)
    else:
        places = sharding_tree.tree if isinstance(sharding_tree, TreeMetadata) else sharding_tree
        found = _jax.tree.map(args_of, tree, places)
    if isinstance(target, TreeMetadata):
        return build_default_tree_metadata(found, custom_metadata=target.custom_metadata)

    return found


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Return a `jax.ShapeDtypeStruct` like an array, or like what describes one.

    Args:
        arr: A jax.Array, a NumPy array, a struct, `ArrayRestoreArgs`, `ArrayMetadata`, or a number.
        dtype: Of the result, instead of its own.
        scalar_dtype: What a number is given to; it is returned as it is otherwise.
        support_format: Whether the struct says how the array is laid out in memory, too.

    Raises:
        ValueError: If it has no shape.
    """
    arr = _key_data(arr)
    if isinstance(arr, int | float | np.number):
        number = cast("Any", arr)
        return number if scalar_dtype is None else scalar_dtype(number)

    shape = getattr(arr, "shape", getattr(arr, "global_shape", None))
    if shape is None:
        raise ValueError(f"{arr!r} has no shape")
    if isinstance(arr, np.ndarray):
        return _jax.ShapeDtypeStruct(shape, dtype or cast("Any", arr).dtype)

    place = arr.sharding
    place = place.to_jax_sharding() if isinstance(place, ShardingMetadata) else _place(arr, support_format)
    return _jax.ShapeDtypeStruct(shape, dtype or arr.dtype, sharding=place)


def _restore_args(value: Any, sharding: Any, *, set_global_shape: bool, strict: bool) -> RestoreArgs:
    match value:
        case StringMetadata() | str():
            return RestoreArgs(restore_type=str)
        case ScalarMetadata():
            kind = _PYTHON[np.dtype(value.dtype).kind]
            return RestoreArgs(restore_type=kind, dtype=value.dtype)
        case ArrayMetadata() | jax.ShapeDtypeStruct() if sharding is None:
            return RestoreArgs(restore_type=np.ndarray, dtype=value.dtype)
        case ArrayMetadata() | jax.ShapeDtypeStruct() | jax.Array():
            shape = value.shape if set_global_shape and not is_key(value.dtype) else None
            return ArrayRestoreArgs(dtype=value.dtype, sharding=sharding, global_shape=shape, strict=strict)
        case np.ndarray():
            array = cast("Any", value)
            return RestoreArgs(restore_type=type(array), dtype=array.dtype)
        case int() | float():
            return RestoreArgs(restore_type=type(value))
        case _ if value is PLACEHOLDER:
            return RestoreArgs(restore_type=type(PLACEHOLDER))
        case Metadata():
            raise ValueError(f"nobody says how a leaf of the metadata {type(value)} is restored")
        case _:
            raise ValueError(f"nobody says how a {type(value)} is restored")


def _place(value: Any, layout: bool) -> Any:
    """The sharding of a value, or its `Format` if that is wanted and there is one."""
    format_ = getattr(value, "format", None) if layout else None
    return getattr(value, "sharding", None) if getattr(format_, "layout", None) is None else format_


def _key_data(value: Any) -> Any:
    """Typed keys are restored by what is stored of them, and their kind by what is recorded."""
    return jax.random.key_data(value) if isinstance(value, jax.Array) and is_key(value.dtype) else value
