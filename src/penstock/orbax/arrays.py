"""Structs that describe arrays, under the names of Orbax's module `arrays`."""

from __future__ import annotations

__all__ = ("Index", "Shape", "construct_maximal_shardings", "to_shape_dtype_struct")

from typing import TypeAlias

from penstock.orbax.common.array_structs import to_shape_dtype_struct
from penstock.orbax.v0.trees.maximal_shardings import construct_maximal_shardings

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[slice, ...]
