"""The module `transform_utils` of Orbax's API."""

from __future__ import annotations

__all__ = ("RestoreTransform", "Transform", "apply_transformations", "intersect_trees", "merge_trees")

from penstock.orbax.transforms import (
    RestoreTransform,
    Transform,
    apply_transformations,
    intersect_trees,
    merge_trees,
)
