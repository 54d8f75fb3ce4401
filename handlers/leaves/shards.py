"""A jax.Array's distinct shards, each on its way to host memory."""

from __future__ import annotations

__all__ = ("PACKED", "shard_pieces")

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Final, cast, final

import jax
import numpy as np
import numpy.typing as npt

from penstock.handlers.leaves.boxes import Box, boxes
from penstock.handlers.leaves.devices import on_host
from penstock.kernel.errors import DeletedLeafError
from penstock.kernel.messages import PiecePlan

PACKED: Final = frozenset({"int2", "int4", "float4_e2m1fn"})
"""Types of which jax keeps several elements in a byte, and numpy one."""


def shard_pieces(
    value: jax.Array, dtype: str, itemsize: int, piece_bytes: int, *, key_path: str, alias: bool
) -> Iterator[PiecePlan]:
    """Plan the pieces of every distinct shard, one chunk a shard, with nothing done yet.

    Args:
        value: Of any sharding over devices of this process, with at least one element.
        dtype: Its dtype by name.
        itemsize: Bytes of one element on the host.
        piece_bytes: Bytes of a piece, at most (but at least one element).
        key_path: For errors.
        alias: Whether to look at the memory of CPU devices instead of copying it.
    """
    sharding = value.sharding
    shape = sharding.shard_shape(value.shape)
    most = max(1, piece_bytes // itemsize)
    host = on_host(sharding)
    alias = alias and host and dtype not in PACKED
    for chunk, data in _distinct(value, shape):
        view = _HostView(value, data, key_path) if alias else None
        for box in boxes(shape, most):
            start, nbytes = box.first * itemsize, box.n_elements * itemsize
            if view is not None:
                take: Callable[[], memoryview] = partial(view.take, start, start + nbytes)
            else:
                take = partial(_copied, value, data, box, dtype, key_path)

            yield PiecePlan(chunk, start, nbytes, 0 if alias else nbytes, take)


def _distinct(value: jax.Array, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], jax.Array]]:
    """Yield the grid index and the data of each shard that no other device holds an earlier copy of."""
    if value.sharding.num_devices == 1:
        yield (0,) * len(shape), value
        return

    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            index = cast("tuple[slice, ...]", shard.index)
            chunk = tuple((part.start or 0) // size for part, size in zip(index, shape, strict=True))
            yield chunk, cast("jax.Array", shard.data)


@final
@dataclass(slots=True)
class _HostView:
    """The memory of one shard on a CPU device, as it is.

    As long as a view of it lives, the runtime neither frees nor reuses the memory: what is donated
    then is copied first. So the array is safe from the moment its first piece is taken.
    """

    value: jax.Array
    data: jax.Array
    key_path: str
    _view: memoryview | None = None
    _lock: Lock = field(default_factory=Lock)

    def take(self, start: int, stop: int) -> memoryview:
        with self._lock:
            if self._view is None:
                try:
                    host = _host_array(self.data)
                except RuntimeError as error:
                    raise _reason(error, self.value, self.key_path) from error

                # An array of an unusual layout is strided here, and copied by `reshape`.
                self._view = _bytes(host)

            return self._view[start:stop]


def _copied(value: jax.Array, data: jax.Array, box: Box, dtype: str, key_path: str) -> memoryview:
    """Copy a box of a shard to the host, leaving nothing of it with the caller's array."""
    try:
        return _bytes(_to_host(data, box, dtype))
    except RuntimeError as error:
        raise _reason(error, value, key_path) from error


def _to_host(data: jax.Array, box: Box, dtype: str) -> npt.NDArray[Any]:
    if box.sizes != data.shape:
        # The device cuts, so that no more than the piece ever comes to the host. Its start is an
        # operand: one compilation serves all pieces of a size.
        return _host_array(_cut(data, tuple(map(np.uint32, box.starts)), sizes=box.sizes))

    # jax keeps the host copy of an array on the array object. This is another object on the same
    # device memory, so that the copy dies with the piece and not with the caller's array.
    part = data.addressable_data(0)
    host = _host_array(jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part]))
    return host if dtype in PACKED or not on_host(part.sharding) else np.array(host, order="C", copy=True)


def _slice(data: jax.Array, starts: tuple[np.uint32, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(data, starts, sizes)


_cut: Callable[..., jax.Array] = cast("Any", jax).jit(_slice, static_argnames="sizes")


def _host_array(data: jax.Array) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.asarray(cast("Any", data))
    return array


def _bytes(host: npt.NDArray[Any]) -> memoryview:
    return host.reshape(-1).view(np.uint8).data


def _reason(error: RuntimeError, value: jax.Array, key_path: str) -> RuntimeError:
    return DeletedLeafError(key_path) if value.is_deleted() else error
