"""The `RestoreArgs` that restore leaves like those of a target."""

from __future__ import annotations

__all__ = ("construct_restore_args", "scalar_args")

from typing import Any, Final, cast

import jax
import numpy as np

from penstock.handlers.leaves.prng_keys import is_key
from penstock.orbax.common.array_structs import key_data, placement_of
from penstock.orbax.common.leaf_args import ArrayRestoreArgs, RestoreArgs
from penstock.orbax.common.value_metadata import ArrayMetadata, Metadata, ScalarMetadata, StringMetadata
from penstock.orbax.v0.common.stored_tree_metadata import TreeMetadata, build_default_tree_metadata
from penstock.orbax.v0.common.tree_utils import PyTree
from penstock.orbax.v0.leaf_handlers.type_handler_registry import PLACEHOLDER

_jax: Any = jax
_PYTHON: Final = ((np.bool_, bool), (np.integer, int), (np.floating, float), (np.complexfloating, complex))


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
        return _restore_args(value, sharding, set_global_shape=set_global_shape, strict=strict)

    tree = target.tree if isinstance(target, TreeMetadata) else target
    tree = _jax.tree.map(key_data, tree)
    if sharding_tree is None:
        # Not a tree of its own: None in it would be no leaf.
        def own(value: Any) -> RestoreArgs:
            return args_of(value, placement_of(value, support_layout))

        found = _jax.tree.map(own, tree)
    else:
        places = sharding_tree.tree if isinstance(sharding_tree, TreeMetadata) else sharding_tree
        found = _jax.tree.map(args_of, tree, places)
    if isinstance(target, TreeMetadata):
        return build_default_tree_metadata(found, custom_metadata=target.custom_metadata)

    return found


def scalar_args(leaf: ScalarMetadata) -> RestoreArgs:
    """Return the `RestoreArgs` that restore a number as one of Python's.

    Args:
        leaf: Its dtype may be one of NumPy's or of jax's.
    """
    # NumPy has one kind for all dtypes that it does not know, and jax knows of what kind they are.
    kinds = [kind for parent, kind in _PYTHON if _jax.numpy.issubdtype(leaf.dtype, parent)]
    return RestoreArgs(restore_type=kinds[0], dtype=leaf.dtype)


def _restore_args(value: Any, sharding: Any, *, set_global_shape: bool, strict: bool) -> RestoreArgs:
    match value:
        case StringMetadata() | str():
            return RestoreArgs(restore_type=str)
        case ScalarMetadata():
            return scalar_args(value)
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
            raise ValueError(f"a leaf described by {type(value)} cannot be restored")
        case _:
            raise ValueError(f"a leaf of type {type(value)} cannot be restored")
