"""Typed wrappers for jax's functions about devices, many of which jax itself does not annotate."""

from __future__ import annotations

__all__ = (
    "Device",
    "Slices",
    "all_devices",
    "default_device",
    "device_indices",
    "devices_of",
    "is_subtype",
    "on_host",
)

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

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
