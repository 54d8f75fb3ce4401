"""Typed wrappers for jax's functions about devices, many of which jax itself does not annotate."""

from __future__ import annotations

__all__ = (
    "Device",
    "Slices",
    "all_devices",
    "default_device",
    "device_indices",
    "devices_of",
    "is_key",
    "is_subtype",
    "key_data_of",
    "key_data_shape",
    "key_dtype",
    "key_impl_of",
    "known_impl",
    "on_host",
)

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.protocols.leaf import ParamInfo

Slices: TypeAlias = tuple[slice, ...]


class Device(Protocol):
    """The part of `jax.Device` that is used here."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def process_index(self) -> int: ...


def all_devices() -> Sequence[Device]:
    """Every device of jax's default backend, in jax's order."""
    return cast("Sequence[Device]", cast("Any", jax).devices())


def default_device() -> Device:
    """The device on which jax puts arrays by default."""
    device: Device | str | None = cast("Any", jax).config.jax_default_device
    if device is None or isinstance(device, str):
        return cast("Sequence[Device]", cast("Any", jax).local_devices(backend=device))[0]

    return device


def devices_of(sharding: Sharding) -> Iterable[Device]:
    """The devices that hold an array of this sharding, each once, in no particular order."""
    return cast("Iterable[Device]", cast("Any", sharding).device_set)


@lru_cache(maxsize=1024)
def on_host(sharding: Sharding) -> bool:
    """Return whether arrays of this sharding are in the memory of CPU devices."""
    return all(device.platform == "cpu" for device in devices_of(sharding))


def device_indices(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[Device, Slices]:
    """Return the part of an array of `shape` that each device of this process holds."""
    indices: Mapping[Device, Slices] = cast("Any", sharding).addressable_devices_indices_map(shape)
    return indices


def is_subtype(dtype: object, kind: object) -> bool:
    """`np.issubdtype` that also knows bfloat16, int4 and typed PRNG keys."""
    return bool(cast("Any", jnp).issubdtype(dtype, kind))


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
