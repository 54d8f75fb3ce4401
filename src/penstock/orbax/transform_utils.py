"""The module `transform_utils` of Orbax's API."""

from __future__ import annotations

__all__ = ("RestoreTransform", "Transform", "apply_transformations", "intersect_trees", "merge_trees")

from penstock.orbax.v0.common.tree_utils import merge_trees
from penstock.orbax.v0.trees.transforms import (
    RestoreTransform,
    Transform,
    apply_transformations,
    intersect_trees,
)
