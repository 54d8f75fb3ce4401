"""The `SaveArgs` of each leaf as penstock's own save options. Pure."""

from __future__ import annotations

__all__ = ("leaf_formats",)

import math
from dataclasses import replace
from typing import Any, Final, TypeGuard

import jax
import numpy as np
from jax import tree_util

from penstock.handlers.formats.orbax.writing.storage_choice import CODED_CHUNK
from penstock.kernel.config.save_format import SaveArgs as LeafFormat
from penstock.kernel.config.save_format import SaveFormat
from penstock.orbax.common.leaf_args import SaveArgs
from penstock.orbax.v0.common.tree_utils import is_empty_or_leaf

_tree: Any = tree_util  # jax declares no types for it
_NOTHING: Final = LeafFormat()


def leaf_formats(item: Any, save_args: Any, form: SaveFormat, file_bytes: int | None) -> Any:
    """Return the save options of each leaf; None if no leaf has any.

    Args:
        item: The tree.
        save_args: A tree of `SaveArgs` like it, or None.
        form: How arrays are stored.
        file_bytes: The target size of a data file of the database. A chunk lies in one file, so this
            also bounds a chunk. None or 0: no bound.

    Raises:
        ValueError: If `save_args` has not the structure of the tree.
    """
    if save_args is not None:
        _tree.tree_map(_nothing, item, save_args, is_leaf=is_empty_or_leaf)

    most = file_bytes if form.ocdbt and file_bytes and file_bytes > 0 else None
    if most is not None and form.codec != "none" and most >= CODED_CHUNK:
        most = None  # chunks with a codec are smaller anyway
    if save_args is None and most is None:
        return None

    if most is None:
        formats = jax.tree.map(_translated, save_args, is_leaf=_is_args)
    else:
        leaves, structure = _tree.tree_flatten(item)
        given = [None] * len(leaves) if save_args is None else structure.flatten_up_to(save_args)
        bounded = [_bounded(_translated(one), value, most) for one, value in zip(given, leaves, strict=True)]
        formats = structure.unflatten(bounded)

    return formats if jax.tree.leaves(formats) else None


def _nothing(value: object, asked: object) -> None:
    """Only the structures are compared, and jax says where they differ."""


def _translated(one: Any) -> LeafFormat | None:
    if not _is_args(one):
        return None

    found = LeafFormat(one.dtype, one.chunk_byte_size, tuple(one.shard_axes))
    return None if found == _NOTHING else found


def _bounded(asked: LeafFormat | None, value: Any, most: int) -> LeafFormat | None:
    """Bound the chunks of a leaf; the options of a leaf smaller than that do not change."""
    dtype: Any = getattr(value, "dtype", None)
    if not hasattr(dtype, "itemsize"):
        return asked

    known = asked or _NOTHING
    itemsize = int((dtype if known.dtype is None else np.dtype(known.dtype)).itemsize)
    small = math.prod(value.shape) * itemsize <= most
    if small or (known.chunk_byte_size is not None and known.chunk_byte_size <= most):
        return asked

    return replace(known, chunk_byte_size=most)


def _is_args(node: Any) -> TypeGuard[SaveArgs]:
    return isinstance(node, SaveArgs)
