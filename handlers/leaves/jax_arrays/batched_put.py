"""Putting many small arrays on one device, by a private jax call where it does the same as the public one.

`jax.device_put` takes some 30 µs for each array of a list; the private call beneath it takes 4. The private
call is tried once for each kind of array. If its result differs in any way from the public call's, or if
`PENSTOCK_PUBLIC_DEVICE_PUT` is set in the environment, the public call is used.
"""

from __future__ import annotations

__all__ = ("PUBLIC_VARIABLE", "put_small")

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, TypeAlias, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding

from penstock.handlers.leaves.jax_arrays.devices import default_device, devices_of

PUBLIC_VARIABLE: Final = "PENSTOCK_PUBLIC_DEVICE_PUT"

_Put: TypeAlias = Callable[[npt.NDArray[Any]], jax.Array]


def put_small(views: Sequence[npt.NDArray[Any]], sharding: Sharding | None) -> list[jax.Array]:
    """Copy arrays of one shape and dtype to one device, each into its own memory. Blocking.

    Args:
        views: Arrays of any alignment. They may change once this has returned.
        sharding: A single-device sharding; None for jax's default device, uncommitted.
    """
    if not views:
        return []
    if not os.environ.get(PUBLIC_VARIABLE):
        device = default_device() if sharding is None else next(iter(devices_of(sharding)))
        place = (device, _memory_kind(sharding), sharding is not None)
        put = _fast_put(views[0].shape, views[0].dtype, place, x64=_x64())
        if put is not None:
            return [put(view) for view in views]

    return put_publicly(views, sharding)


def put_publicly(views: Sequence[npt.NDArray[Any]], sharding: Sharding | None) -> list[jax.Array]:
    """Do the same with jax's public call."""
    # Copied, because jax may use the memory for as long as the array lives.
    copies = [view.copy() for view in views]
    put: Callable[..., list[jax.Array]] = cast("Any", jax).device_put
    return put(copies) if sharding is None else put(copies, [sharding] * len(copies))


def _x64() -> bool:
    return bool(cast("Any", jax).config.jax_enable_x64)


def _memory_kind(sharding: Sharding | None) -> str | None:
    return None if sharding is None else sharding.memory_kind


@lru_cache(maxsize=1024)
def _fast_put(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    place: tuple[Any, str | None, bool],
    *,
    x64: bool,
) -> _Put | None:
    """Return the fast call for arrays of one kind, or None unless its result equals the public call's."""
    device, memory_kind, committed = place
    del x64  # only a part of the cache key: how jax treats 64-bit types depends on it
    try:
        sharding = SingleDeviceSharding(device, memory_kind=memory_kind)
        put = _private_put(shape, dtype, device, sharding, committed=committed)
        return put if _gives_the_same(put, shape, dtype, sharding if committed else None) else None
    except Exception:  # another version of jax may fail here in any way
        return None


def _private_put(
    shape: tuple[int, ...], dtype: np.dtype[Any], device: Any, sharding: Sharding, *, committed: bool
) -> _Put:
    # Imported here, so that a version without these names falls back to the public call.
    private: Any = import_module("jax._src.lib")
    aval = cast("Any", import_module("jax._src.core")).ShapedArray(shape, dtype)
    put: Callable[..., jax.Array] = private.xla_client.batched_device_put
    during_call = private._jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
    devices = [device]
    force_copy = False

    def one(view: npt.NDArray[Any]) -> jax.Array:
        return put(aval, sharding, (view,), devices, committed, force_copy, during_call)

    return one


def _gives_the_same(
    put: _Put, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding | None
) -> bool:
    """Compare with the public call on a probe array, whose memory is then overwritten to detect aliasing."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.arange(nbytes + 1, dtype=np.uint64).astype(np.uint8)
    if dtype == np.bool_ or dtype.itemsize == 1:
        buffer &= 1  # not every byte is a valid bool or int4

    probe = np.ndarray(shape, dtype, buffer.data, 1)  # not aligned, as in a pack
    expected = probe.copy()
    (public,) = put_publicly([probe], sharding)
    found = put(probe)
    cast("Any", jax).block_until_ready(found)
    buffer[:] = 1 - (buffer & 1)  # the array must not use this memory any more
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
        and np.asarray(cast("Any", found)).tobytes() == expected.tobytes()
    )
