"""Types of arrays and of their abstract leaves."""

from __future__ import annotations

__all__ = (
    "AbstractArray",
    "AbstractScalar",
    "AbstractShardedArray",
    "ArrayLike",
    "DType",
    "Scalar",
    "Shape",
    "to_shape_dtype_struct",
)

from penstock.orbax.common.array_structs import to_shape_dtype_struct
from penstock.orbax.v1.common.array_types import (
    AbstractArray,
    AbstractScalar,
    AbstractShardedArray,
    ArrayLike,
    DType,
    Scalar,
    Shape,
)
