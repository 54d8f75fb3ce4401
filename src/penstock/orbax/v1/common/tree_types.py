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

from penstock.orbax.v1.common.array_types import AbstractArray, AbstractScalar, AbstractShardedArray, Scalar

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
_jax: Any = tree_util


def is_supported_leaf(x: object) -> bool:
    """Whether `save` knows leaves of this type."""
    return isinstance(x, _LEAVES)


def is_supported_abstract_leaf(x: object) -> bool:
    """Whether `load` takes this type as an abstract leaf."""
    if x is PLACEHOLDER:
        return True

    kind = x if isinstance(x, type) else type(x)
    return has_attributes(kind, "shape", "dtype") or issubclass(kind, _NUMBERS)


def has_attributes(kind: type, *names: str) -> bool:
    """Whether objects of a type have attributes, as far as the type shows: dataclasses declare theirs."""
    declared = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    return all(name in declared or hasattr(kind, name) for name in names)


def merge(*trees: PyTree, overwrite: bool = False, is_leaf: Any = None) -> PyTree:
    """Return one tree with the leaves of all: dicts by key, lists and tuples of one length by position.

    Args:
        *trees: The first determines the containers.
        overwrite: Whether a later leaf replaces an earlier one.
        is_leaf: As for `jax.tree.map`.

    Raises:
        ValueError: If two trees have the same leaf and `overwrite` is off, or do not fit.
    """
    merged: Any = trees[0] if trees else None
    for tree in trees[1:]:
        merged = _merge(merged, tree, (), overwrite=overwrite, is_leaf=is_leaf)

    return merged


def _merge(first: Any, second: Any, at: tuple[Any, ...], *, overwrite: bool, is_leaf: Any) -> Any:
    if is_leaf is None or not (is_leaf(first) or is_leaf(second)):
        if _both(dict, first, second):
            merged: dict[Any, Any] = dict(first)
            for key, value in second.items():
                old = merged.get(key, _ABSENT)
                merged[key] = value
                if old is not _ABSENT:
                    merged[key] = _merge(old, value, (*at, key), overwrite=overwrite, is_leaf=is_leaf)

            return merged

        if type(first) is type(second) and (_both(list, first, second) or _both(tuple, first, second)):
            if len(first) != len(second):
                raise ValueError(f"at {at}: sequences of {len(first)} and of {len(second)} cannot be merged")

            items = [
                _merge(a, b, (*at, n), overwrite=overwrite, is_leaf=is_leaf)
                for n, (a, b) in enumerate(zip(first, second, strict=True))
            ]
            return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)

    if first is None or overwrite:
        return second
    if second is None:
        return first

    raise ValueError(f"two trees have a leaf at {at}, and overwrite is False")


def _both(kind: type[Any], first: Any, second: Any) -> bool:
    return isinstance(first, kind) and isinstance(second, kind)


_ABSENT: Final = object()
