"""Where a restored jax.Array is to lie, and making it from host memory."""

from __future__ import annotations

__all__ = ("Placement", "make_arrays", "split")

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast, final

import jax
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding

from penstock.handlers.leaves.devices import Device, default_device, device_indices, on_host
from penstock.handlers.leaves.regions import HostRegion
from penstock.kernel.messages import ReadLeaf

Bounds: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """How the value of one leaf is made from its regions; `Target.detail` of the array handler."""

    sharding: Sharding | None = None  #: of the (key) data; None is jax's default device, uncommitted
    as_numpy: bool = False  #: jax cannot hold it here as it was saved, so numpy does
    key_impl: str | None = None  #: wrap the data as typed PRNG keys
    wide: bool = False  #: of a 64-bit type while jax_enable_x64 is off

    @property
    def keeps_regions(self) -> bool:
        """Whether the value goes on living in the regions' memory."""
        if self.as_numpy:
            return True

        return default_device().platform == "cpu" if self.sharding is None else on_host(self.sharding)


@final
@dataclass(frozen=True, slots=True)
class _Split:
    """Which distinct parts of an array the devices of this process hold."""

    bounds: tuple[Bounds, ...]
    #: With the number of the part each one holds; none if jax can place the whole by itself.
    devices: tuple[tuple[Device, int], ...] = ()


@lru_cache(maxsize=4096)
def split(sharding: Sharding | None, shape: tuple[int, ...]) -> _Split:
    """Find the distinct parts of an array of `shape`.

    Raises:
        ValueError: If the sharding does not divide the shape.
        IndexError: If it has more axes than the shape.
    """
    whole = tuple((0, size) for size in shape)
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return _Split((whole,))

    parts: dict[Bounds, int] = {}
    devices: list[tuple[Device, int]] = []
    for device, index in device_indices(sharding, shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        devices.append((device, parts.setdefault(bounds, len(parts))))

    # Given a sharding with devices of other processes, jax would compare the values over the network.
    alone = len(parts) == 1 and sharding.is_fully_addressable
    return _Split(tuple(parts), () if alone else tuple(devices))


def make_arrays(leaves: Sequence[ReadLeaf]) -> list[object]:
    """Make the value of every leaf, all through one transfer call for each kind of placement. Blocking.

    On CPU devices the arrays go on living in the regions' memory. To other devices the bytes are
    copied; this returns when that is done, so that the regions may die.
    """
    plans = [cast("Placement", leaf.target.detail) for leaf in leaves]
    # Whether jax narrows is a setting of the thread. Who asked for 64 bits by name gets them.
    with jax.enable_x64(True) if any(plan.wide for plan in plans) else nullcontext():
        loose, placed = _put(leaves, plans)
        values = [_assemble(leaf, plan, loose, placed) for leaf, plan in zip(leaves, plans, strict=True)]

    if any(leaf.target.staging_bytes for leaf in leaves):
        cast("Any", jax).block_until_ready(values)

    return values


def _put(
    leaves: Sequence[ReadLeaf], plans: Sequence[Placement]
) -> tuple[Iterator[jax.Array], Iterator[jax.Array]]:
    """Transfer all parts; return those without and those with a place, each in the order of the leaves."""
    loose: list[npt.NDArray[Any]] = []
    placed: list[npt.NDArray[Any]] = []
    places: list[Sharding | Device] = []
    for leaf, plan in zip(leaves, plans, strict=True):
        if plan.as_numpy:
            continue

        hosts = _hosts(leaf)
        devices = _devices(leaf, plan)
        if plan.sharding is None:
            loose += hosts
        elif not devices:
            placed += hosts
            places.append(plan.sharding)
        else:
            placed += [hosts[part] for _, part in devices]
            places += [device for device, _ in devices]

    put = cast("Any", jax).device_put
    return iter(put(loose)), iter(put(placed, places))


def _assemble(
    leaf: ReadLeaf, plan: Placement, loose: Iterator[jax.Array], placed: Iterator[jax.Array]
) -> object:
    if plan.as_numpy:
        return _hosts(leaf)[0]

    value: jax.Array
    devices = _devices(leaf, plan)
    if plan.sharding is None:
        value = next(loose)
    elif not devices:
        value = next(placed)
    else:
        parts = [next(placed) for _ in devices]
        shape = leaf.stored.spec.shape or ()
        value = jax.make_array_from_single_device_arrays(shape, plan.sharding, parts)

    if plan.key_impl is not None:
        value = jax.random.wrap_key_data(value, impl=plan.key_impl)

    return cast("object", value)


def _hosts(leaf: ReadLeaf) -> list[npt.NDArray[Any]]:
    return [cast("HostRegion", region).array() for region in leaf.target.regions]


def _devices(leaf: ReadLeaf, plan: Placement) -> tuple[tuple[Device, int], ...]:
    return split(plan.sharding, leaf.stored.spec.shape or ()).devices
