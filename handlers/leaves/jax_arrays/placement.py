"""Where to place a restored jax.Array, and how to make it from host memory."""

from __future__ import annotations

__all__ = ("Bounds", "Placement", "bounds_of", "make_arrays", "split")

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast, final

import jax
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding

from penstock.handlers.leaves.common.host_buffers import HostRegion
from penstock.handlers.leaves.common.mismatches import stored_dtype
from penstock.handlers.leaves.jax_arrays.devices import Slices, default_device, device_indices, on_host
from penstock.kernel.protocols.views import FilledLeaf

Bounds: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """How to make the value of one leaf from its regions. The array handler's `Target.detail`."""

    sharding: Sharding | None = None  #: of the data or key data; None for jax's default device, uncommitted
    as_numpy: bool = False  #: make an np.ndarray, because jax here cannot hold the array as it was saved
    key_impl: str | None = None  #: wrap the data as typed PRNG keys of this implementation
    wide: bool = False  #: a 64-bit type is wanted while jax_enable_x64 is off
    copied: bool = False  #: copy the regions, although a CPU device could use them in place

    @property
    def keeps_regions(self) -> bool:
        """Whether the value keeps using the regions' memory."""
        if self.as_numpy:
            return True

        return default_device().platform == "cpu" if self.sharding is None else on_host(self.sharding)


@lru_cache(maxsize=4096)
def split(sharding: Sharding | None, shape: tuple[int, ...]) -> tuple[Bounds, ...]:
    """Return the distinct parts of an array of `shape` that the devices of this process will hold.

    Raises:
        ValueError: If the sharding does not divide the shape.
        IndexError: If the sharding has more axes than the shape.
    """
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return (tuple([(0, size) for size in shape]),)

    return tuple({bounds_of(index, shape): None for index in device_indices(sharding, shape).values()})


def make_arrays(leaves: Sequence[FilledLeaf]) -> list[object]:
    """Make the value of every leaf, all single-device arrays in one call. Blocking.

    Arrays on CPU devices keep using the regions' memory. For other devices the bytes are copied, and this
    returns only when the copies are done, so that the regions can be freed.
    """
    plans = [cast("Placement", leaf.target.detail) for leaf in leaves]
    # Whether jax narrows 64-bit types is a thread-local setting; a target that names one gets it.
    with jax.enable_x64(True) if any(plan.wide for plan in plans) else nullcontext():
        loose, placed = _put(leaves, plans)
        values = [_value(leaf, plan, loose, placed) for leaf, plan in zip(leaves, plans, strict=True)]

    if any(leaf.target.staging_bytes for leaf in leaves):
        cast("Any", jax).block_until_ready(values)

    return values


def _put(
    leaves: Sequence[FilledLeaf], plans: Sequence[Placement]
) -> tuple[Iterator[jax.Array], Iterator[jax.Array]]:
    """Transfer the leaves for the default device, and those for one given device, each in order."""
    loose: list[npt.NDArray[Any]] = []
    placed: list[npt.NDArray[Any]] = []
    places: list[Sharding] = []
    for leaf, plan in zip(leaves, plans, strict=True):
        if plan.as_numpy:
            continue
        if plan.sharding is None:
            loose.append(_host(leaf, plan))
        elif isinstance(plan.sharding, SingleDeviceSharding):
            placed.append(_host(leaf, plan))
            places.append(plan.sharding)

    put = cast("Any", jax).device_put
    return iter(put(loose)), iter(put(placed, places))


def _value(
    leaf: FilledLeaf, plan: Placement, loose: Iterator[jax.Array], placed: Iterator[jax.Array]
) -> object:
    if plan.as_numpy:
        return _host(leaf, plan)

    value: jax.Array
    if plan.sharding is None:
        value = next(loose)
    elif isinstance(plan.sharding, SingleDeviceSharding):
        value = next(placed)
    else:
        value = _sharded(leaf, plan, plan.sharding)

    if plan.key_impl is not None:
        return cast("object", jax.random.wrap_key_data(value, impl=plan.key_impl))

    return value


def _sharded(leaf: FilledLeaf, plan: Placement, sharding: Sharding) -> jax.Array:
    """Make an array on several devices; its shards alias their regions where possible."""
    shape = leaf.stored.spec.shape or ()
    if not leaf.target.regions:  # it lies on devices of other processes alone
        make: Callable[..., jax.Array] = jax.make_array_from_single_device_arrays
        return make(shape, sharding, [], dtype=stored_dtype(leaf.stored))

    parts = {region.bounds: cast("HostRegion", region).array() for region in leaf.target.regions}

    def part(index: Slices | None) -> npt.NDArray[Any]:
        return _copied_if(plan, parts[bounds_of(index or (), shape)])

    # Costs a fifth of transferring each shard as its own array and joining them.
    array: jax.Array = cast("Any", jax).make_array_from_callback(shape, sharding, part)
    return array


def bounds_of(index: Slices, shape: tuple[int, ...]) -> Bounds:
    """The (start, stop) along each axis of the region that the slices select."""
    return tuple([part.indices(size)[:2] for part, size in zip(index, shape, strict=True)])


def _host(leaf: FilledLeaf, plan: Placement) -> npt.NDArray[Any]:
    return _copied_if(plan, cast("HostRegion", leaf.target.regions[0]).array())


def _copied_if(plan: Placement, host: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return host.copy() if plan.copied else host
