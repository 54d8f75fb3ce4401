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

from typing import Any, Protocol, TypeAlias

import numpy as np

from penstock.orbax.arrays import to_shape_dtype_struct

Shape: TypeAlias = tuple[int, ...]
DType: TypeAlias = np.dtype[Any]
Scalar: TypeAlias = int | float | np.number[Any] | bytes | bool
AbstractScalar: TypeAlias = Scalar


class AbstractArray(Protocol):
    """The abstract leaf of a NumPy array: an object with a shape and a dtype.

    Attributes:
        shape: None for as stored.
        dtype: None for as stored.
    """

    shape: Shape | None
    dtype: DType | None


class AbstractShardedArray(Protocol):
    """The abstract leaf of a jax.Array: it has a sharding, too.

    Attributes:
        shape: None for as stored.
        dtype: None for as stored.
        sharding: A sharding, or a jax `Format`; None for as stored.
    """

    shape: Shape | None
    dtype: DType | None
    sharding: Any = None


ArrayLike: TypeAlias = AbstractArray | AbstractShardedArray
