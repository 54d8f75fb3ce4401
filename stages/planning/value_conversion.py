"""What functions of the caller get of a stored leaf, and making what they return what the target asks for."""

from __future__ import annotations

__all__ = ("conformed", "source_like")

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from penstock.kernel.errors import TreeDifference
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.stages.planning.leaf_sources import rule_difference

Abstract: TypeAlias = jax.Array | jax.ShapeDtypeStruct
_ARRAY_TYPES = (jax.Array, jax.ShapeDtypeStruct)


def source_like(spec: LeafSpec, like: Any) -> tuple[Any, bool, Callable[[Any], Any]]:
    """Decide what a stored leaf is restored as, when a function makes the wanted leaf of it.

    It has its own shape and dtype and, so far as it can, the kind and the sharding of the leaf that is
    wanted: what a function makes of it is then where it is to be.

    Returns:
        The restore target; whether there is one, else it is restored as it was saved; and what is to
        be done to the value before the function sees it.
    """
    if spec.shape is None or spec.random_key_impl is not None:
        return None, False, _unchanged
    if isinstance(like, np.ndarray) or like is np.ndarray:
        return np.ndarray, True, _unchanged
    if isinstance(like, type):
        is_array = issubclass(like, _ARRAY_TYPES)
        return (jax.Array, True, _unchanged) if is_array else (None, False, _unchanged)
    if not isinstance(like, _ARRAY_TYPES):
        return None, False, _unchanged
    if isinstance(like, jax.Array) and not like.committed:
        return np.ndarray, True, _on_default_device

    sharding: Any = like.sharding
    if sharding is None or not _places(sharding) or not _divides(sharding, spec.shape):
        return jax.Array, True, _unchanged

    make: Any = jax.ShapeDtypeStruct  # whose constructor has no types
    return make(spec.shape, np.dtype(spec.dtype), sharding=sharding), True, _unchanged


def conformed(value: object, like: Any, key_path: str) -> object:
    """Return what a function made as the target has it: the same kind of array, in the same place.

    Nothing is cast and nothing reshaped. What is no array is returned as it is.

    Returns:
        The value, or a `TreeDifference` if it does not fit.
    """
    wanted = like if isinstance(like, type) else type(like)
    if issubclass(wanted, (*_ARRAY_TYPES, np.ndarray)):
        if not isinstance(value, jax.Array | np.ndarray | np.generic):
            return _different(key_path, like, value)

        array: Any = cast("Any", value)
        if not isinstance(like, type) and (array.dtype, array.shape) != (like.dtype, like.shape):
            return _different(key_path, like, array)

        return np.asarray(array) if issubclass(wanted, np.ndarray) else _placed(array, like)

    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        return _different(key_path, like, value)

    return value


def _placed(array: Any, like: Any) -> jax.Array:
    put = cast("Any", jax).device_put
    wide = not isinstance(array, jax.Array) and array.dtype.itemsize >= 8
    with jax.enable_x64(True) if wide else nullcontext():  # else jax would narrow it
        sharding = None if isinstance(like, type) else like.sharding
        if sharding is None or not _places(sharding) or (isinstance(like, jax.Array) and not like.committed):
            return cast("jax.Array", array if isinstance(array, jax.Array) else put(array))

        return cast("jax.Array", put(array, sharding))


def _places(sharding: object) -> bool:
    return not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh))


def _divides(sharding: Any, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError):
        return False

    return True


def _unchanged(value: Any) -> Any:
    return value


def _on_default_device(value: Any) -> Any:
    return _placed(value, jax.Array)


def _different(key_path: str, like: Any, value: object) -> TreeDifference:
    return rule_difference(key_path, f"{_text(like)} in the target, {_text(value)} made by its function")


def _text(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__

    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    name = "jax.Array" if isinstance(value, jax.Array) else type(value).__name__
    return name if shape is None else f"{name} {dtype}{list(shape)}"
