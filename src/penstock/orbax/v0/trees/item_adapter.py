"""The fast way to restore onto an item: as a restore target, if the request is that simple. Pure."""

from __future__ import annotations

__all__ = ("fits", "has_structure_of", "target_of")

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import tree_util
from jax.sharding import Sharding

from penstock.handlers.leaves.jax_arrays.prng_keys import is_key
from penstock.orbax.common.array_structs import is_narrowed
from penstock.orbax.common.leaf_args import ArrayRestoreArgs, RestoreArgs
from penstock.orbax.v0.leaf_handlers.type_handler_registry import PLACEHOLDER

_tree: Any = tree_util  # jax declares no types for it
_struct: Any = jax.ShapeDtypeStruct
_TYPES: Final = frozenset({int, float, str, np.ndarray})


def target_of(item: Any, restore_args: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the restore target and what each restored leaf must be; None if the request is not simple.

    Check the result with `fits`: what is stored is not known here.

    Args:
        item: The structure of the result.
        restore_args: Of the same structure.
    """
    leaves, structure = _tree.tree_flatten(item)
    args, args_structure = _tree.tree_flatten(restore_args, is_leaf=_is_args)
    if structure != args_structure:
        return None

    structs: dict[Any, Any] = {}
    wanted: list[Any] = []
    likes: list[Any] = []
    for leaf, arg in zip(leaves, args, strict=True):
        if type(arg) is RestoreArgs and arg.restore_type in _TYPES and leaf is not PLACEHOLDER:
            if arg.dtype is not None and not (type(leaf) is np.ndarray and leaf.dtype == arg.dtype):
                return None  # it may have to be cast

            wanted.append(arg.restore_type)
            likes.append(arg.restore_type if arg.dtype is None else leaf)
        elif type(arg) is ArrayRestoreArgs and _is_plain(arg, leaf):
            key = arg.sharding, leaf.shape, leaf.dtype
            like = structs.get(key)
            if like is None:
                like = structs[key] = _struct(leaf.shape, leaf.dtype, sharding=arg.sharding)

            wanted.append(jax.Array)
            likes.append(like)
        else:
            return None

    return structure.unflatten(likes), wanted


def fits(restored: Any, wanted: Sequence[Any]) -> bool:
    """Whether the leaves of a result are as requested."""
    leaves = _tree.tree_leaves(restored)
    return len(leaves) == len(wanted) and all(
        type(leaf) is kind or (kind is jax.Array and isinstance(leaf, jax.Array))
        for leaf, kind in zip(leaves, wanted, strict=True)
    )


def has_structure_of(restored: Any, item: Any) -> bool:
    """Whether a tree of dicts and lists has exactly the structure of an item, which leaves out no leaf."""
    leaves, structure = _tree.tree_flatten(item)
    same: bool = structure == _tree.tree_structure(restored)
    return same and not any(leaf is PLACEHOLDER for leaf in leaves)


def _is_args(node: object) -> bool:
    return isinstance(node, RestoreArgs)


def _is_plain(arg: ArrayRestoreArgs, leaf: Any) -> bool:
    """Whether the request for an array matches the item, with a sharding."""
    return (
        isinstance(arg.sharding, Sharding)
        and arg.mesh is None
        and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
        and (arg.dtype == leaf.dtype if arg.dtype is not None else arg.strict)
        and (arg.global_shape == leaf.shape if arg.global_shape is not None else arg.strict)
        and bool(leaf.shape)
        and leaf.dtype != np.uint32  # it may be the data of a stored key
        and not is_key(leaf.dtype)
        and not is_narrowed(leaf.dtype)
    )
