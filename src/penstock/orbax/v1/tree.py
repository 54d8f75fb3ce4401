"""Types of trees and leaves, and merging."""

from __future__ import annotations

__all__ = (
    "PLACEHOLDER",
    "AbstractLeaf",
    "JsonType",
    "Leaf",
    "PyTree",
    "PyTreeKey",
    "PyTreeKeyPath",
    "PyTreeOf",
    "is_supported_abstract_leaf",
    "is_supported_leaf",
    "merge",
)

import inspect
from types import EllipsisType
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax import tree_util

from penstock.orbax.tree import merge_trees as merge
from penstock.orbax.v1.arrays import AbstractArray, AbstractScalar, AbstractShardedArray, Scalar

PyTree: TypeAlias = Any
PyTreeOf: TypeAlias = Any
PyTreeKey: TypeAlias = Any
PyTreeKeyPath: TypeAlias = tuple[Any, ...]
JsonType: TypeAlias = Any
Leaf: TypeAlias = jax.Array | np.ndarray[Any, Any] | Scalar | str
AbstractLeaf: TypeAlias = AbstractArray | AbstractShardedArray | AbstractScalar | str

PLACEHOLDER: Final[EllipsisType] = ...
"""Stands for a leaf that is not to be loaded; the result has it, too."""

_LEAVES: Final = (jax.Array, np.ndarray, int, float, np.number, bytes, bool, str)
_NUMBERS: Final = (int, float, np.number, bytes, bool, str)
_tree: Any = tree_util  # jax declares no types for it


def is_supported_leaf(x: object) -> bool:
    """Return whether `save` knows leaves of this type."""
    return isinstance(x, _LEAVES)


def is_supported_abstract_leaf(x: object) -> bool:
    """Return whether `load` takes this type as an abstract leaf."""
    if x is PLACEHOLDER:
        return True

    kind = x if isinstance(x, type) else type(x)
    return has_attributes(kind, "shape", "dtype") or issubclass(kind, _NUMBERS)


def has_attributes(kind: type, *names: str) -> bool:
    """Return whether objects of a type have attributes, as far as it declares them: dataclasses do."""
    declared = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    return all(name in declared or hasattr(kind, name) for name in names)
