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

from penstock.orbax.v0.trees.tree_operations import merge_trees as merge
from penstock.orbax.v1.common.tree_types import (
    PLACEHOLDER,
    AbstractLeaf,
    JsonType,
    Leaf,
    PyTree,
    PyTreeKey,
    PyTreeKeyPath,
    PyTreeOf,
    is_supported_abstract_leaf,
    is_supported_leaf,
)
