"""Structs that describe arrays, and shardings for them, under the names of Orbax's module `arrays`."""

from __future__ import annotations

__all__ = ("Index", "Shape", "construct_maximal_shardings", "to_shape_dtype_struct")

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast

import jax
import numpy as np

from penstock.embedding import dtypes, prng_keys
from penstock.orbax.value_metadata import ShardingMetadata, to_sharding

_sharding: Any = jax.sharding

Shape: TypeAlias = tuple[int, ...]

Index: TypeAlias = tuple[slice, ...]

_jax: Any = jax


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Return a `jax.ShapeDtypeStruct` like an array or a description of one.

    Args:
        arr: A jax.Array, a NumPy array, a struct, `ArrayRestoreArgs`, `ArrayMetadata`, or a number.
        dtype: Of the result; None for that of the array.
        scalar_dtype: What a number is converted to; by default it is returned unchanged.
        support_format: Whether the struct includes the memory layout.

    Raises:
        ValueError: If it has no shape.
    """
    arr = key_data(arr)
    if isinstance(arr, int | float | np.number):
        number = cast("Any", arr)
        return number if scalar_dtype is None else scalar_dtype(number)

    shape = getattr(arr, "shape", getattr(arr, "global_shape", None))
    if shape is None:
        raise ValueError(f"{arr!r} has no shape")
    if isinstance(arr, np.ndarray):
        return _jax.ShapeDtypeStruct(shape, dtype or cast("Any", arr).dtype)

    place = arr.sharding
    place = (
        place.to_jax_sharding() if isinstance(place, ShardingMetadata) else placement_of(arr, support_format)
    )
    return _jax.ShapeDtypeStruct(shape, dtype or arr.dtype, sharding=place)


def jax_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype that a jax.Array of it has: of 64 bits only where jax is set to allow them."""
    found: np.dtype[Any] = _jax.dtypes.canonicalize_dtype(_numpy(dtype))
    return found


def is_narrowed(dtype: Any) -> bool:
    """Return whether a jax.Array of this dtype has another one here, as float64 without `jax_enable_x64`."""
    if not dtype and not isinstance(dtype, np.dtype):
        return False
    try:
        known = _numpy(dtype)
    except (TypeError, ValueError):  # it is no dtype of arrays
        return False

    return known.kind in "fiuc" and jax_dtype(known) != known


def _numpy(dtype: Any) -> np.dtype[Any]:
    return dtypes.numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)


_NUMBERS: Final = ((np.bool_, bool), (np.integer, int), (np.floating, float), (np.complexfloating, complex))


def number_type(dtype: Any) -> type[Any]:
    """Return Python's type of a number that is stored with a dtype of NumPy's or of jax's."""
    known = _numpy(dtype)
    # NumPy has one kind for all dtypes that it does not know, and jax knows of what kind they are.
    return next((kind for parent, kind in _NUMBERS if _jax.numpy.issubdtype(known, parent)), float)


def asked_placement(args: Any) -> Any:
    """Return the sharding, or the `Format`, that `RestoreArgs` ask for; None if they leave it open.

    `mesh` with `mesh_axes` counts before `sharding`, as in Orbax; one of the two alone does not count.
    """
    mesh, axes = getattr(args, "mesh", None), getattr(args, "mesh_axes", None)
    if mesh is not None and axes is not None:
        return jax.sharding.NamedSharding(mesh, axes)

    return to_sharding(getattr(args, "sharding", None))


def placement_of(value: Any, layout: bool) -> Any:
    """The sharding of a value, or its `Format` if that is wanted and there is one."""
    format_ = getattr(value, "format", None) if layout else None
    return getattr(value, "sharding", None) if getattr(format_, "layout", None) is None else format_


def key_data(value: Any) -> Any:
    """Return the data of typed keys: that is what is stored; their kind is recorded."""
    return (
        jax.random.key_data(value)
        if isinstance(value, jax.Array) and prng_keys.is_key(value.dtype)
        else value
    )


def construct_maximal_shardings(abstract_state: Any, devices: Sequence[Any] | None = None) -> Any:
    """Return a tree with a sharding for each leaf, to restore what one device has no memory for.

    The longest axes of an array are cut first, each into equal parts. An array with fewer elements along each
    axis than there are devices is replicated.

    Args:
        abstract_state: A tree of arrays, or of structs with their shape.
        devices: Where the parts are to be; by default on all.
    """
    chosen = np.asarray(_jax.devices() if devices is None else devices)
    return _jax.tree.map(partial(_sharding_of, devices=chosen), abstract_state)


def _sharding_of(leaf: Any, devices: Any) -> Any:
    shape, n_devices = tuple(leaf.shape), int(devices.size)
    if max(shape, default=0) < min(n_devices, _jax.device_count()):
        return _sharding.NamedSharding(_sharding.Mesh(devices, ("a",)), _sharding.PartitionSpec())

    counts, axes = _cuts(shape, n_devices)
    names = tuple(chr(ord("a") + at) for at in range(len(counts)))
    spec = [names[axes.index(axis)] if axis in axes else None for axis in range(len(shape))]
    mesh = _sharding.Mesh(devices.reshape(counts), names)
    return _sharding.NamedSharding(mesh, _sharding.PartitionSpec(*spec))


def _cuts(shape: tuple[int, ...], n_devices: int) -> tuple[list[int], list[int]]:
    """Return the shape of the mesh, and which axes of the array its first axes cut."""
    left, counts, axes = n_devices, list[int](), list[int]()
    for axis in map(int, np.argsort(shape)[::-1]):
        parts = math.gcd(shape[axis], left) if shape[axis] >= left else 1
        if parts > 1:
            counts.append(parts)
            axes.append(axis)
            left //= parts

    return (counts if left == 1 else [*counts, left]), axes
