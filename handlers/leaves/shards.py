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

from penstock.handlers.dtypes import dtype_name
from penstock.handlers.leaves.boxes import Box, boxes, flat_index, is_contiguous
from penstock.handlers.leaves.chunks import cast_to, chunk_boxes
from penstock.handlers.leaves.devices import on_host
from penstock.kernel.errors import DeletedLeafError
from penstock.kernel.messages import LeafSpec, PiecePlan

PACKED: Final = frozenset({"int2", "int4", "float4_e2m1fn"})
"""Types of which jax keeps several elements in a byte, and numpy one."""


def shard_pieces(
    value: jax.Array, spec: LeafSpec, piece_bytes: int, *, key_path: str, alias: bool
) -> Iterator[PiecePlan]:
    """Plan the pieces of every distinct shard, chunk by chunk, with nothing done yet.

    Args:
        value: Of any sharding over devices of this process, with at least one element.
        spec: The dtype it is to have, and the chunk shape, which divides that of a shard.
        piece_bytes: Bytes of a piece, at most (but at least one element).
        key_path: For errors.
        alias: Whether to look at the memory of CPU devices instead of copying it.
    """
    sharding = value.sharding
    shape = sharding.shard_shape(value.shape)
    dtype, itemsize = dtype_name(value.dtype), spec.itemsize
    most = max(1, piece_bytes // itemsize)
    alias = alias and on_host(sharding) and dtype not in PACKED
    if spec.chunk_shape != shape or spec.dtype != dtype:
        yield from _recut_pieces(value, shape, spec, most, key_path=key_path, alias=alias)
        return

    for chunk, data in _distinct(value, shape):
        view = _HostView(value, data, key_path) if alias else None
        for box in boxes(shape, most):
            start, nbytes = box.first * itemsize, box.n_elements * itemsize
            if view is not None:
                take: Callable[[], memoryview] = partial(view.take, start, start + nbytes)
            else:
                take = partial(_copied, value, data, box, dtype, key_path)

            yield PiecePlan(chunk, start, nbytes, 0 if alias else nbytes, take)


def _recut_pieces(
    value: jax.Array, shape: tuple[int, ...], spec: LeafSpec, most: int, *, key_path: str, alias: bool
) -> Iterator[PiecePlan]:
    """Plan the pieces of an array that is stored in smaller chunks than shards, or in another dtype.

    Host memory is looked at only where a piece of it is contiguous, and is not cast.
    """
    dtype, itemsize = dtype_name(value.dtype), spec.itemsize
    is_cast = dtype != spec.dtype
    per_shard = [size // part for size, part in zip(shape, spec.chunk_shape, strict=True)]
    for shard, data in _distinct(value, shape):
        view = _HostView(value, data, key_path) if alias else None
        for chunk, box in chunk_boxes(shape, spec.chunk_shape, most):
            nbytes = box.n_elements * itemsize
            cost = nbytes + (box.n_elements * value.dtype.itemsize if is_cast else 0)
            take: Callable[[], memoryview]
            if view is None:
                take = partial(_copied, value, data, box, dtype, key_path, spec.dtype)
            elif is_contiguous(box, shape) and not is_cast:
                start = flat_index(box.starts, shape) * itemsize
                take, cost = partial(view.take, start, start + nbytes), 0
            else:
                take = partial(view.copy, box, spec.dtype)

            index = tuple([at * n + inner for at, n, inner in zip(shard, per_shard, chunk, strict=True)])
            yield PiecePlan(index, box.first * itemsize, nbytes, cost, take)


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
                # An array of an unusual layout is strided here, and copied by `reshape`.
                self._view = _bytes(self._host())

            return self._view[start:stop]

    def copy(self, box: Box, dtype: str) -> memoryview:
        """Copy a box of it, in another dtype."""
        return _bytes(cast_to(self._host()[box.slices], dtype, copy=True))

    def _host(self) -> npt.NDArray[Any]:
        try:
            return _host_array(self.data)
        except RuntimeError as error:
            raise _reason(error, self.value, self.key_path) from error


def _copied(
    value: jax.Array, data: jax.Array, box: Box, dtype: str, key_path: str, stored: str = ""
) -> memoryview:
    """Copy a box of a shard to the host, leaving nothing of it with the caller's array."""
    try:
        host = _to_host(data, box, dtype)
        return _bytes(cast_to(host, stored) if stored else host)
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
