"""Structs that describe arrays, under the names of Orbax's module `arrays`."""

from __future__ import annotations

__all__ = ("Index", "Shape", "to_shape_dtype_struct")

from typing import TypeAlias

from penstock.orbax.common.array_structs import to_shape_dtype_struct

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[slice, ...]
