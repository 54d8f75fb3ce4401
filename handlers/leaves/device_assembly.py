"""Filling a jax.Array part by part on its devices, so that the host never holds the whole array."""

from __future__ import annotations

__all__ = ("as_bits", "blank_shard", "canvas_parts", "join_parts", "paste", "place_part")

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast, final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding

from penstock.handlers.leaves.blocks import Box, HostRegion, boxes
from penstock.handlers.leaves.devices import Device, device_indices, devices_of, is_subtype
from penstock.handlers.leaves.restore_target import ArrayPlacement, Bounds, bounds_of
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.leaf_handlers import ReadLeaf
from penstock.kernel.protocols.reads import Target


def canvas_parts(stored: StoredLeaf, target: Target, part_bytes: int, *, whole_chunks: bool) -> list[Target]:
    """Cut the regions of a target, which are one shard each, into parts; see `PartsHandler.parts`.

    Shards that hold the same rows are cut alike, and their boxes form one part, because the bytes read for
    one also contain those of the others.
    """
    placement = cast("ArrayPlacement", target.detail)
    if not target.staging_bytes or placement.as_numpy or not _in_main_memory(placement.sharding):
        return []

    regions = [cast("HostRegion", region) for region in target.regions]
    together: defaultdict[Bounds, list[HostRegion]] = defaultdict(list)
    for region in regions:
        together[region.bounds[:1]].append(region)

    dtype, shape = regions[0].dtype, regions[0].shape  # shards are all of one shape
    most = max(1, part_bytes // (dtype.itemsize * max(map(len, together.values()))))
    cuts = list(_chunk_rows(shape, stored.spec.chunk_shape, most) if whole_chunks else boxes(shape, most))
    if len(cuts) * len(together) < 2:
        return []

    canvas = _Canvas(placement, stored.spec.shape or (), dtype)
    return [_part(canvas, group, box) for group in together.values() for box in cuts]


def place_part(part: ReadLeaf) -> None:
    """Write the filled regions of a part into the shards on their devices, and free them. Blocking."""
    detail = cast("_Part", part.target.detail)
    detail.canvas.fill(detail, [cast("HostRegion", region) for region in part.target.regions])


def join_parts(part: ReadLeaf) -> object:
    """Return the finished array, after every part was placed."""
    return cast("_Part", part.target.detail).canvas.array()


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """Describes one part: the same box of several shards."""

    canvas: _Canvas
    shards: tuple[Bounds, ...]  #: for each region, the bounds of its shard
    starts: tuple[int, ...]  #: where the box begins in each shard


@final
class _Canvas:
    """The shards of an array that is being filled, each allocated when its first part arrives."""

    __slots__ = ("_dtype", "_homes", "_lock", "_placement", "_shape", "_shards")

    def __init__(self, placement: ArrayPlacement, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._placement = placement
        self._shape = shape
        self._dtype = dtype
        self._lock = Lock()
        self._shards: dict[Device | None, jax.Array] = {}
        self._homes: dict[Bounds, list[Device | None]] = {}
        if placement.sharding is None:
            self._homes[tuple([(0, size) for size in shape])] = [None]
        else:
            for device, index in device_indices(placement.sharding, shape).items():
                self._homes.setdefault(bounds_of(index, shape), []).append(device)

    def fill(self, part: _Part, regions: Sequence[HostRegion]) -> None:
        starts = tuple(map(np.uint32, part.starts))
        with self._lock, self._width():
            for region, bounds in zip(regions, part.shards, strict=True):
                for device in self._homes[bounds]:
                    shard = self._shards.pop(device, None)
                    if shard is None:
                        shape = tuple([stop - start for start, stop in bounds])
                        shard = blank_shard(shape, self._dtype, device)

                    self._shards[device] = paste(shard, _put(region.array(), device), starts)

            # Until then the regions' memory may be read: by a copy to a device, or by an update on the host.
            cast("Any", jax).block_until_ready(list(self._shards.values()))

        for region in regions:
            region.let_go()

    def array(self) -> object:
        sharding, key_impl = self._placement.sharding, self._placement.key_impl
        value = self._shards.pop(None) if sharding is None else self._joined(sharding)
        return value if key_impl is None else cast("object", jax.random.wrap_key_data(value, impl=key_impl))

    def _joined(self, sharding: Sharding) -> jax.Array:
        shards = [self._shards.pop(device) for device in device_indices(sharding, self._shape)]
        return jax.make_array_from_single_device_arrays(self._shape, sharding, shards)

    def _width(self) -> AbstractContextManager[object]:
        # Whether jax narrows 64-bit types is a thread-local setting; a target that names one gets it.
        return jax.enable_x64(True) if self._placement.wide else nullcontext()


def _part(canvas: _Canvas, shards: Sequence[HostRegion], box: Box) -> Target:
    regions = tuple([_within(shard, box) for shard in shards])
    detail = _Part(canvas, tuple([shard.bounds for shard in shards]), box.starts)
    return Target(regions, sum(region.nbytes for region in regions), detail)


def _within(shard: HostRegion, box: Box) -> HostRegion:
    corner = [start + at for (start, _), at in zip(shard.bounds, box.starts, strict=True)]
    bounds = tuple([(at, at + size) for at, size in zip(corner, box.sizes, strict=True)])
    return HostRegion(bounds, shard.dtype)


def _chunk_rows(shape: tuple[int, ...], chunk_shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Cut a shard between rows of chunks; leave it whole if the rows do not divide it evenly."""
    if not shape or shape[0] % chunk_shape[0]:
        yield Box((0,) * len(shape), shape, 0)
        return

    length, row, tail = shape[0], math.prod(shape[1:]), shape[1:]
    step = max(1, most // (row * chunk_shape[0])) * chunk_shape[0]
    for at in range(0, length, step):
        yield Box((at, *(0,) * len(tail)), (min(step, length - at), *tail), at * row)


def _in_main_memory(sharding: Sharding | None) -> bool:
    """Return whether arrays of this sharding are in their devices' default memory."""
    kind = None if sharding is None else sharding.memory_kind
    if sharding is None or kind is None:
        return True

    return all(cast("Any", device).default_memory().kind == kind for device in devices_of(sharding))


def blank_shard(shape: tuple[int, ...], dtype: np.dtype[Any], device: Device | None) -> jax.Array:
    """Return zeros on a device, to be filled by `paste`; None is the default device."""
    place = None if device is None else SingleDeviceSharding(cast("Any", device))
    zeros: Callable[..., jax.Array] = cast("Any", jnp).zeros
    return zeros(shape, dtype, device=place)


def _put(host: npt.NDArray[Any], device: Device | None) -> jax.Array:
    put: Callable[..., jax.Array] = cast("Any", jax).device_put
    return put(host) if device is None else put(host, device)


def as_bits(array: jax.Array) -> jax.Array:
    """Return floats as integers of their bits: XLA changes some NaNs of narrow floats that it moves."""
    if not is_subtype(array.dtype, jnp.floating):
        return array

    bits: int = cast("Any", jnp).finfo(array.dtype).bits
    return jax.lax.bitcast_convert_type(array, f"uint{bits}")


def _update(shard: jax.Array, part: jax.Array, starts: tuple[np.uint32, ...]) -> jax.Array:
    pasted = jax.lax.dynamic_update_slice(as_bits(shard), as_bits(part), starts)
    return pasted if pasted.dtype == shard.dtype else jax.lax.bitcast_convert_type(pasted, shard.dtype)


# The shard is donated, so it is updated in place. The start is an operand, so that one compilation serves
# all parts of one size.
paste: Callable[..., jax.Array] = cast("Any", jax).jit(_update, donate_argnums=0)
"""Returns a shard with a part put in at some place, all on one device. The shard given is gone."""
