"""Restoring many small jax.Arrays at a time: one buffer for all, and one call that puts them on devices."""

from __future__ import annotations

__all__ = ("PUBLIC_VARIABLE", "make_small", "put_small")

import itertools
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, TypeAlias, cast, final

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding

from penstock.handlers.leaves.blocks import shared_views
from penstock.handlers.leaves.devices import default_device, devices_of, on_host
from penstock.handlers.leaves.restore_target import ArrayPlacement
from penstock.handlers.leaves.shards import shard_grid
from penstock.kernel.protocols.reads import SharedRead


def make_small(shared: SharedRead, placements: Sequence[Any]) -> list[jax.Array]:
    """Make the array of every leaf, each in its own memory. Blocking."""
    views = list(shared_views(shared))
    kinds = zip(map(id, shared.specs), map(id, placements), strict=True)
    arrays: list[jax.Array] = []
    at = 0
    for _, group in itertools.groupby(kinds):
        stop = at + len(list(group))
        sharding = cast("ArrayPlacement", placements[at]).sharding
        arrays += put_small(views[at:stop], sharding)
        on_cpu = default_device().platform == "cpu" if sharding is None else on_host(sharding)
        if not on_cpu:  # the buffer may be freed after this call
            cast("Any", jax).block_until_ready(arrays[at:stop])

        at = stop

    return arrays


# `jax.device_put` takes some 30 µs for each array of a list, and 18 µs for each shard of an array on several
# devices; the private call beneath it takes 4. The private call is tried once for each kind of array. If its
# result differs in any way from the public call's, or if `PENSTOCK_PUBLIC_DEVICE_PUT` is set in the
# environment, the public call is used.
PUBLIC_VARIABLE: Final = "PENSTOCK_PUBLIC_DEVICE_PUT"

_Put: TypeAlias = Callable[[npt.NDArray[Any]], jax.Array]


def put_small(views: Sequence[npt.NDArray[Any]], sharding: Sharding | None) -> list[jax.Array]:
    """Copy arrays of one shape and dtype to their devices, each into its own memory. Blocking.

    Args:
        views: Whole arrays, of any alignment. They may change once this has returned.
        sharding: Divides them evenly (see `shard_grid`); None for jax's default device, uncommitted.
    """
    if not views:
        return []
    if not os.environ.get(PUBLIC_VARIABLE):
        place = SingleDeviceSharding(cast("Any", default_device())) if sharding is None else sharding
        x64 = bool(cast("Any", jax).config.jax_enable_x64)
        put = _fast_put(views[0].shape, views[0].dtype, place, committed=sharding is not None, x64=x64)
        if put is not None:
            return [put(view) for view in views]

    return put_publicly(views, sharding)


def put_publicly(views: Sequence[npt.NDArray[Any]], sharding: Sharding | None) -> list[jax.Array]:
    """Put arrays on devices by jax's public call."""
    # Copied, because jax may use the memory for as long as the array lives.
    copies = [view.copy() for view in views]
    put: Callable[..., list[jax.Array]] = cast("Any", jax).device_put
    return put(copies) if sharding is None else put(copies, [sharding] * len(copies))


@lru_cache(maxsize=1024)
def _fast_put(
    shape: tuple[int, ...], dtype: np.dtype[Any], place: Sharding, *, committed: bool, x64: bool
) -> _Put | None:
    """Return the fast call for arrays of one kind, or None unless its result equals the public call's."""
    del x64  # only a part of the cache key: how jax treats 64-bit types depends on it
    probe = _Probe(shape, dtype)
    try:
        (public,) = put_publicly([probe.array], place if committed else None)
        put = _private_put(cast("Any", public).aval, place, committed=committed)
        return put if probe.gives_the_same(put, public) else None
    except Exception:  # another version of jax may fail here in any way
        return None


def _private_put(aval: Any, place: Sharding, *, committed: bool) -> _Put:
    # Imported here, so that a version without these names falls back to the public call.
    private: Any = import_module("jax._src.lib")
    put: Callable[..., jax.Array] = private.xla_client.batched_device_put
    during_call = private._jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
    force_copy = False
    devices = list(devices_of(place))

    def one(view: npt.NDArray[Any]) -> jax.Array:
        return put(aval, place, (view,), devices, committed, force_copy, during_call)

    if len(devices) == 1:
        return one

    grid = shard_grid(place, aval.shape)
    assert grid is not None, "the array is divided evenly"
    devices = list(grid.devices)

    def several(view: npt.NDArray[Any]) -> jax.Array:
        # Replicas have memory of their own: the call fails where two devices are given the same bytes.
        return put(aval, place, grid.on_devices(view), devices, committed, force_copy, during_call)

    return several


@final
class _Probe:
    """An array by which the private call is compared with the public one."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # No two shards are alike, so that none can be mistaken for another.
        self._bytes = np.random.default_rng(0).integers(0, 256, nbytes + 1, np.uint8)
        if dtype == np.bool_ or dtype.itemsize == 1:
            self._bytes &= 1  # not every byte is a valid bool or int4

        self.array = np.ndarray(shape, dtype, self._bytes.data, 1)  # not aligned, as in a pack

    def gives_the_same(self, put: _Put, public: jax.Array) -> bool:
        """Return whether `put` gives what the public call gave, and keeps none of the memory it got."""
        expected = self.array.tobytes()
        found = put(self.array)
        cast("Any", jax).block_until_ready(found)
        self._bytes[:] = 1 - (self._bytes & 1)
        return (
            type(found) is type(public)
            and found.shape == public.shape
            and found.dtype == public.dtype
            and found.sharding == public.sharding
            and found.committed is public.committed
            and cast("Any", found).weak_type is cast("Any", public).weak_type is False
            and not found.is_deleted()
            and cast("Any", found).aval == cast("Any", public).aval
            and np.asarray(cast("Any", found)).tobytes() == np.asarray(cast("Any", public)).tobytes()
            and np.asarray(cast("Any", found)).tobytes() == expected
        )
