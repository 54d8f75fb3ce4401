"""Placeholder strings in the msgpack files of old Orbax versions, and numbers as leaves."""

from __future__ import annotations

__all__ = (
    "all_leaves_are_placeholders",
    "is_scalar",
    "leaf_is_placeholder",
    "leaf_placeholder",
    "name_from_leaf_placeholder",
    "pytree_structure",
)

import errno
import os
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from penstock.handlers.formats.orbax.file_names import ARRAY_METADATAS, METADATA, SHARDING
from penstock.handlers.stores.local import LocalStore
from penstock.orbax.v0.common.tree_utils import PyTree, from_flat_dict

_jax: Any = jax
_PREFIXES: Final = ("PLACEHOLDER://", "AGGREGATED://")
_NO_LEAVES: Final = frozenset({METADATA, SHARDING, ARRAY_METADATAS})


def is_scalar(x: Any) -> bool:
    """Whether `x` is a Python or NumPy number."""
    return isinstance(x, int | float | np.number)


def leaf_is_placeholder(leaf: Any) -> bool:
    """Whether a leaf of an old msgpack file only says that its value is stored elsewhere."""
    return isinstance(leaf, str) and leaf.startswith(_PREFIXES)


def leaf_placeholder(name: str) -> str:
    """Return the placeholder of the leaf that is stored under `name`."""
    return _PREFIXES[0] + name


def name_from_leaf_placeholder(placeholder: str) -> str:
    """Return the stored name that a placeholder refers to.

    Raises:
        ValueError: If it is not a placeholder.
    """
    for prefix in _PREFIXES:
        if placeholder.startswith(prefix):
            return placeholder.removeprefix(prefix)

    raise ValueError(f"{placeholder!r} is not a placeholder of a leaf")


def all_leaves_are_placeholders(tree: PyTree) -> bool:
    """Whether the msgpack file itself holds no value."""
    return all(leaf_is_placeholder(leaf) for leaf in _jax.tree.leaves(tree))


def pytree_structure(directory: Any) -> PyTree:
    """Infer the structure of a tree from the names in its directory, as nested dicts of placeholders.

    Raises:
        FileNotFoundError: If there is no such directory.
        ValueError: If one name is the beginning of another.
    """
    store, path = LocalStore(), str(Path(directory))
    if store.kind(path) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    listed = store.list_directory(path)
    names = sorted(name for name in listed if name not in _NO_LEAVES)
    return from_flat_dict({name: leaf_placeholder(name) for name in names}, sep=".")
