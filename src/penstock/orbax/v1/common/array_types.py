"""Types of arrays and of what stands for them."""

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

import jax
import numpy as np
from jax.sharding import Sharding

_jax: Any = jax

Shape: TypeAlias = tuple[int, ...]
DType: TypeAlias = np.dtype[Any]
Scalar: TypeAlias = int | float | np.number[Any] | bytes | bool
AbstractScalar: TypeAlias = Scalar


class AbstractArray(Protocol):
    """What has a shape and a dtype: a NumPy array is to be loaded there.

    Attributes:
        shape: None for as stored.
        dtype: None for as stored.
    """

    shape: Shape | None
    dtype: DType | None


class AbstractShardedArray(Protocol):
    """What has a sharding, too: a jax.Array is to be loaded there.

    Attributes:
        shape: None for as stored.
        dtype: None for as stored.
        sharding: A sharding, or a jax `Format`; None for as stored.
    """

    shape: Shape | None
    dtype: DType | None
    sharding: Any = None


ArrayLike: TypeAlias = AbstractArray | AbstractShardedArray


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Return what stands for an array in an abstract tree; numbers and texts stand for themselves.

    Args:
        arr: An array, a struct, a number, or anything with `shape`, `dtype` and `sharding`.
        dtype: In place of that of `arr`.
        scalar_dtype: The type of the result for a number.
        support_format: Whether the layout on the device is part of the result.
    """
    if isinstance(arr, jax.Array) and _jax.dtypes.issubdtype(arr.dtype, _jax.dtypes.prng_key):
        arr = jax.random.key_data(arr)
    number: Any = arr
    if isinstance(arr, int | float | np.number):
        return number if scalar_dtype is None else scalar_dtype(number)

    shape, kind = tuple(arr.shape), arr.dtype if dtype is None else dtype
    if isinstance(arr, np.ndarray):
        return _jax.ShapeDtypeStruct(shape, kind)

    sharding: Any = getattr(arr, "format", None) if support_format else None
    if sharding is None:
        sharding = arr.sharding
    if not isinstance(sharding, Sharding) and hasattr(sharding, "to_jax_sharding"):
        sharding = sharding.to_jax_sharding()

    return _jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
