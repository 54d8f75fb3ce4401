"""Typed PRNG keys: their data, implementation and dtype."""

from __future__ import annotations

__all__ = ("is_key", "key_data_of", "key_data_shape", "key_dtype", "key_impl_of", "known_impl")

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, cast

import jax
import numpy as np

from penstock.handlers.leaves.devices import is_subtype
from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.protocols.leaf import ParamInfo

_IMPLS: Final = ("threefry2x32", "rbg", "unsafe_rbg")


def is_key(dtype: object) -> bool:
    """Return whether this is a dtype of typed PRNG keys (`key<fry>`) rather than of numbers."""
    return not isinstance(dtype, np.dtype) and is_subtype(dtype, jax.dtypes.prng_key)


def key_data_of(keys: jax.Array) -> jax.Array:
    """The uint32 data, with one more axis at the end. It shares the keys' memory; nothing is computed."""
    return jax.random.key_data(keys)


def key_impl_of(keys: jax.Array, info: ParamInfo) -> str:
    """The name of the keys' implementation.

    Raises:
        InvalidLeafError: If the implementation has no registered name, so a restore could not find it.
    """
    impl = jax.random.key_impl(keys)
    if not isinstance(impl, str):
        raise InvalidLeafError(
            info.key_path,
            f"the PRNG implementation {impl} is not registered with jax; save jax.random.key_data(keys)",
        )

    return impl


@lru_cache(maxsize=64)
def key_dtype(impl: str) -> Any:
    """The dtype of typed keys of a named implementation.

    Raises:
        ValueError: If jax knows no implementation of this name.
    """
    return _abstract_key(impl).dtype


@lru_cache(maxsize=64)
def key_data_shape(impl: str) -> tuple[int, ...]:
    """The shape of one key's uint32 data, for example `(2,)`.

    Raises:
        ValueError: If jax knows no implementation of this name.
    """
    return tuple(_struct(jax.random.key_data, _abstract_key(impl)).shape)


def known_impl(dtype: object) -> str | None:
    """The name of the implementation of a key dtype; None if it is not one of jax's own."""
    return next((impl for impl in _IMPLS if key_dtype(impl) == dtype), None)


def _abstract_key(impl: str) -> jax.ShapeDtypeStruct:
    def make() -> jax.Array:
        return jax.random.key(0, impl=impl)

    return _struct(make)


def _struct(function: Callable[..., jax.Array], *arguments: object) -> jax.ShapeDtypeStruct:
    return cast("jax.ShapeDtypeStruct", cast("Any", jax).eval_shape(function, *arguments))
