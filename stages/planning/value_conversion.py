"""Prepares stored leaves for a caller's function, and converts its result to the type of the target."""

from __future__ import annotations

__all__ = ("maker", "source_like")

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from penstock.kernel.errors import TreeDifference
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.stages.planning.leaf_sources import Function, call_foreign, rule_difference

Abstract: TypeAlias = jax.Array | jax.ShapeDtypeStruct
_ARRAY_TYPES = (jax.Array, jax.ShapeDtypeStruct)


def source_like(spec: LeafSpec, like: Any) -> tuple[Any, bool, Callable[[Any], Any]]:
    """Decide what a stored leaf is restored as when a function makes a leaf of the result from it.

    The leaf keeps its shape and dtype. Where possible it gets the type and the sharding of the leaf that
    the function makes, so that the result is already on the right devices.

    Returns:
        The restore target; whether there is one (else the leaf is restored as it was saved); and a
        function to apply to the value before the caller's function gets it.
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

    make: Any = jax.ShapeDtypeStruct  # its constructor is untyped
    return make(spec.shape, np.dtype(spec.dtype), sharding=sharding), True, _unchanged


def maker(
    function: Function, info: ParamInfo, like: Any, shared: Sequence[bool]
) -> Callable[[Sequence[Any]], object]:
    """Return a function that makes a leaf of the result from the values of its inputs.

    Args:
        function: The caller's function.
        info: Where the leaf stands in the result.
        like: The target's leaf at that place.
        shared: For each input, whether other functions get the same value. Such a NumPy array is made
            read-only.
    """

    def make(values: Sequence[Any]) -> object:
        for value, others_use_it in zip(values, shared, strict=True):
            if others_use_it and isinstance(value, np.ndarray):
                value.flags.writeable = False

        called = call_foreign(function.call, function.name, info.key_path, values)
        made: Any = _conformed(called, like, info.key_path)
        # A view would keep the whole buffer alive, and a view of a shared buffer could change later.
        sole = len(values) == 1 and made is values[0] and not shared[0]
        return made if sole or not _is_part(made, values) else made.copy()

    return make


def _is_part(made: Any, values: Sequence[Any]) -> bool:
    """Whether a NumPy array may share memory with one of `values`."""
    if not isinstance(made, np.ndarray):
        return False

    arrays: list[Any] = [value for value in values if isinstance(value, np.ndarray)]
    return any(np.may_share_memory(cast("Any", made), array) for array in arrays)


def _conformed(value: object, like: Any, key_path: str) -> object:
    """Convert the result of a function to the target's type of array, with the target's sharding.

    Nothing is cast and nothing is reshaped. A value that is not an array is returned as it is.

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
    with jax.enable_x64(True) if wide else nullcontext():  # else jax would narrow it to 32 bits
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
