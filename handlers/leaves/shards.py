"""The distinct shards of a jax.Array: which of them this process saves, as views or copies in host memory."""

from __future__ import annotations

__all__ = ("PACKED", "BoxCopy", "ShardGrid", "parts_here", "processes_of", "shard_grid", "shard_pieces")

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Final, cast, final

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from penstock.handlers.dtypes import dtype_name
from penstock.handlers.leaves.blocks import Box, boxes, cast_to, chunk_boxes, flat_index, is_contiguous
from penstock.handlers.leaves.devices import Device, Slices, device_indices, devices_of, on_host
from penstock.kernel.errors import DeletedLeafError
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.written import PiecePlan

PACKED: Final = frozenset({"int2", "int4", "float4_e2m1fn"})
"""Dtypes of which jax packs several elements into a byte, and numpy only one."""


def shard_pieces(
    value: jax.Array, spec: LeafSpec, piece_bytes: int, *, key_path: str, alias: bool
) -> Iterator[PiecePlan]:
    """Plan the pieces of every distinct shard, chunk by chunk. Copies nothing yet.

    If each replica writes only a part of a shard, each part is taken from another device, and the devices'
    pieces alternate so that their copies can overlap.

    Args:
        value: An array of any sharding, with at least one element. Of one that is spread over processes,
            the pieces are those that this process writes.
        spec: Gives the dtype to store, the part of a shard that one replica writes (`write_shape`), and the
            chunk shape, which divides that part.
        piece_bytes: The most bytes of a copied piece, which has at least one element. A view is one piece
            of any size: it costs nothing, and the caller cuts it to bound the bytes in flight.
        key_path: The leaf's key path, for errors.
        alias: Whether to use the memory of CPU devices instead of copying it.
    """
    sharding = value.sharding
    shape = sharding.shard_shape(value.shape)
    dtype, itemsize = dtype_name(value.dtype), spec.itemsize
    most = max(1, piece_bytes // itemsize)
    host = on_host(sharding)
    alias = alias and host and dtype not in PACKED
    if spec.chunk_shape != shape or spec.dtype != dtype:
        yield from _recut_pieces(value, shape, spec, most, key_path=key_path, alias=alias)
        return

    whole = math.prod(shape) * itemsize
    for source in _sources(value, shape, shape, spec.replicas.writer):
        if alias:
            view = _HostView(value, source.data, key_path)
            yield PiecePlan(source.shard, 0, whole, 0, partial(view.take, 0, whole))
            continue

        # In pieces, so that an array larger than the budget streams through it.
        for box in boxes(shape, most):
            start, nbytes = box.first * itemsize, box.n_elements * itemsize
            copy = BoxCopy(value, source.data, box, key_path)
            yield PiecePlan(source.shard, start, nbytes, nbytes, copy.take, None if host else copy.begin)


def _recut_pieces(
    value: jax.Array, shape: tuple[int, ...], spec: LeafSpec, most: int, *, key_path: str, alias: bool
) -> Iterator[PiecePlan]:
    """Plan the pieces of an array whose chunks are smaller than its shards, or whose dtype changes."""
    written = shape if spec.write_shape is None else spec.write_shape
    sources = list(_sources(value, shape, written, spec.replicas.writer))
    if not sources:
        return
    if written == shape:
        for source in sources:
            yield from _source_pieces(value, source, spec, most, key_path=key_path, alias=alias)

        return

    # One piece of each device is copied at the same time. A chunk that will be encoded must not be cut.
    least = 1 if spec.codec is None else math.prod(spec.chunk_shape)
    most = max(most // len(sources), least)
    turns = [_source_pieces(value, source, spec, most, key_path=key_path, alias=alias) for source in sources]
    for together in itertools.zip_longest(*turns):
        yield from filter(None, together)


def _source_pieces(
    value: jax.Array, source: _Source, spec: LeafSpec, most: int, *, key_path: str, alias: bool
) -> Iterator[PiecePlan]:
    """Plan the pieces of the part that one device writes.

    With a view of host memory, a piece is copied only if it is not contiguous or must be cast.
    """
    itemsize, data = spec.itemsize, source.data
    shape, is_cast = data.shape, dtype_name(value.dtype) != spec.dtype
    host = on_host(value.sharding)
    first = source.first_chunk(shape, spec.chunk_shape)
    view = _HostView(value, data, key_path) if alias else None
    for chunk, inner in chunk_boxes(source.shape, spec.chunk_shape, most):
        box = replace(inner, starts=_sum(inner.starts, source.corner))
        nbytes = box.n_elements * itemsize
        cost = nbytes + (box.n_elements * value.dtype.itemsize if is_cast else 0)
        take: Callable[[], memoryview]
        begin: Callable[[], None] | None = None
        if view is None:
            copy = BoxCopy(value, data, box, key_path, spec.dtype)
            take, begin = copy.take, None if host else copy.begin
        # A view costs neither a copy nor budget.
        elif is_contiguous(box, shape) and not is_cast:
            start = flat_index(box.starts, shape) * itemsize
            take, cost = partial(view.take, start, start + nbytes), 0
        else:
            take = partial(view.copy, box, spec.dtype)

        yield PiecePlan(_sum(first, chunk), box.first * itemsize, nbytes, cost, take, begin)


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(operator.add, left, right))


@final
@dataclass(frozen=True, slots=True)
class _Source:
    """The part that one device writes: a shard, or a part of one that several devices hold."""

    shard: tuple[int, ...]  #: grid index of the shard
    corner: tuple[int, ...]  #: where the part begins in the shard
    shape: tuple[int, ...]  #: shape of the part
    data: jax.Array  #: the whole shard

    def first_chunk(self, shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The grid index of the part's first chunk, in the whole array."""
        return tuple(
            [
                (at * size + start) // chunk
                for at, size, start, chunk in zip(self.shard, shape, self.corner, chunk_shape, strict=True)
            ]
        )


def _sources(
    value: jax.Array, shape: tuple[int, ...], part: tuple[int, ...], writer: int | None
) -> Iterator[_Source]:
    """Yield what each device of this process writes, shard by shard in C order.

    Args:
        value: The array.
        shape: The shape of its shards.
        part: The shape of the part that one replica writes; replica k writes the k-th part. If it is the
            shape of a shard, the first replica writes the whole shard.
        writer: Which replica counts as the first, if other processes hold parts of the array; None if each
            process writes all that it holds.
    """
    nowhere = (0,) * len(shape)
    if not value.is_fully_addressable:
        yield from _sources_here(value, shape, part, writer)
        return
    if value.sharding.num_devices == 1:
        yield _Source(nowhere, nowhere, shape, value)
        return

    grid = shard_grid(value.sharding, value.shape)
    assert grid is not None, "jax divides arrays evenly"
    cut = _cut_axis(shape, part)
    if cut is None:
        for at, holders in zip(grid.indices, grid.holders, strict=True):
            yield _Source(at, nowhere, shape, value.addressable_data(holders[0]))

        return

    n_parts = shape[cut] // part[cut]
    shards = value.addressable_shards  # of an array that is on all devices, `addressable_data` knows only one
    for at, holders in zip(grid.indices, grid.holders, strict=True):
        for replica, number in enumerate(holders[:n_parts]):
            yield _Source(at, _corner(replica, part, cut), part, cast("jax.Array", shards[number].data))


def _sources_here(
    value: jax.Array, shape: tuple[int, ...], part: tuple[int, ...], writer: int | None
) -> Iterator[_Source]:
    """Return the sources of an array that other processes hold parts of."""
    cut = _cut_axis(shape, part)
    data = {cast("Device", shard.device): cast("jax.Array", shard.data) for shard in value.addressable_shards}
    for found in parts_here(value.sharding, value.shape, part, writer):
        corner = (0,) * len(shape) if cut is None else _corner(found.number, part, cut)
        yield _Source(found.shard, corner, part, data[found.device])


def _cut_axis(shape: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    return next((axis for axis, size in enumerate(shape) if part[axis] != size), None)


def _corner(number: int, part: tuple[int, ...], cut: int) -> tuple[int, ...]:
    return tuple([number * part[cut] if axis == cut else 0 for axis in range(len(part))])


@final
@dataclass(slots=True)
class _HostView:
    """A view of the memory of one shard on a CPU device.

    The runtime neither frees nor reuses the memory while a view of it lives; a donation then copies it
    first. So the array is safe as soon as its first piece is taken.
    """

    value: jax.Array
    data: jax.Array
    key_path: str
    _view: memoryview | None = None
    _lock: Lock = field(default_factory=Lock)

    def take(self, start: int, stop: int) -> memoryview:
        with self._lock:
            if self._view is None:
                # An array with an unusual layout is strided here; `_bytes` copies it when it reshapes it.
                self._view = _bytes(self._host())

            return self._view[start:stop]

    def copy(self, box: Box, dtype: str) -> memoryview:
        """Return a copy of a box, in `dtype`."""
        return _bytes(cast_to(self._host()[box.slices], dtype, copy=True))

    def _host(self) -> npt.NDArray[Any]:
        try:
            return _host_array(self.data)
        except RuntimeError as error:
            raise _reason(error, self.value, self.key_path) from error


@final
@dataclass(slots=True)
class BoxCopy:
    """Copies one box of a shard to the host, without caching a host copy on the caller's array."""

    value: jax.Array
    data: jax.Array
    box: Box
    key_path: str
    stored: str = ""  #: dtype to cast to; empty for no cast
    _part: jax.Array | None = None

    def begin(self) -> None:
        """Start the copy. Not to be called for an array that is on the host already."""
        try:
            self._part = self._cut_out()
            self._part.copy_to_host_async()
        except RuntimeError as error:
            raise _reason(error, self.value, self.key_path) from error

    def take(self) -> memoryview:
        """Wait for the copy, and return its bytes."""
        try:
            part = self._cut_out() if self._part is None else self._part
            host = _host_array(part)
        except RuntimeError as error:
            raise _reason(error, self.value, self.key_path) from error

        self._part = None
        if self.box.sizes == self.data.shape and on_host(part.sharding) and not _is_packed(part):
            host = np.array(host, order="C", copy=True)  # jax returned a view, not a copy

        return _bytes(cast_to(host, self.stored) if self.stored else host)

    def _cut_out(self) -> jax.Array:
        if self.box.sizes != self.data.shape:
            # The device cuts, so that only the piece is copied to the host. The start is an operand, so
            # that one compilation serves all pieces of one size.
            return _cut(self.data, tuple(map(np.uint32, self.box.starts)), sizes=self.box.sizes)

        # jax caches the host copy of an array on the array object. This is a new object for the same
        # device memory, so that the copy is freed with the piece, not with the caller's array.
        part = self.data.addressable_data(0)
        return jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part])


def _is_packed(array: jax.Array) -> bool:
    return dtype_name(array.dtype) in PACKED


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


@final
@dataclass(frozen=True, slots=True)
class WrittenPart:
    """The part of an array that one device of this process writes."""

    device: Device
    shard: tuple[int, ...]  #: grid index of the shard
    number: int  #: which part of the shard: they are cut along one axis


@lru_cache(maxsize=1024)  # keeps no arrays alive, only meshes and devices, which live as long as the process
def parts_here(
    sharding: Sharding, shape: tuple[int, ...], part: tuple[int, ...], writer: int | None
) -> tuple[WrittenPart, ...]:
    """Return the parts of arrays of `shape` that this process writes, shard by shard in C order.

    The replicas of a shard are counted in the order of the devices, as jax does. Replica `writer` writes the
    first part. The others follow at equal distances, around: neighbours are mostly of one process.

    Args:
        sharding: Of the arrays, over devices of any processes.
        shape: Of the whole array; without elements, nothing is written.
        part: The shape of the part that one replica writes: of a shard, or cut from it.
        writer: Which replica writes the first part; None if each process writes all parts that it holds.
    """
    if 0 in shape:
        return ()

    whole = sharding.shard_shape(shape)
    n_parts = math.prod(whole) // math.prod(part)
    replicas: defaultdict[tuple[int, ...], list[Device]] = defaultdict(list)
    for device, index in _all_indices(sharding, shape).items():
        bounds = [along.indices(size)[0] for along, size in zip(index, shape, strict=True)]
        replicas[tuple([start // size for start, size in zip(bounds, whole, strict=True)])].append(device)

    here = set(device_indices(sharding, shape))
    found: list[WrittenPart] = []
    for shard in sorted(replicas):
        devices = replicas[shard]
        if writer is None:
            devices = [device for device in devices if device in here]
        if not devices:  # other processes hold it, and write it elsewhere
            continue

        first, apart = writer or 0, max(1, len(devices) // n_parts)
        for number in range(n_parts):
            device = devices[(first + number * apart) % len(devices)]
            if device in here:
                found.append(WrittenPart(device, shard, number))

    return tuple(found)


@lru_cache(maxsize=1024)  # as above
def processes_of(sharding: Sharding) -> AbstractSet[int]:
    """Return the processes whose devices hold parts of an array of this sharding."""
    return frozenset([device.process_index for device in devices_of(sharding)])


def _all_indices(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[Device, Slices]:
    """Return the part of an array of `shape` that each device holds, those of other processes included."""
    indices: Mapping[Device, Slices] = cast("Any", sharding).devices_indices_map(shape)
    return indices


@final
@dataclass(frozen=True, slots=True)
class ShardGrid:
    """The shards that the devices of this process hold of an array, as a grid without gaps."""

    shape: tuple[int, ...]  #: of a shard
    counts: tuple[int, ...]  #: shards along each axis
    devices: tuple[Device, ...]  #: in the order of the array's own addressable shards
    places: tuple[int, ...]  #: which shard each of these devices holds, in C order of the grid
    holders: tuple[
        tuple[int, ...], ...
    ]  #: for each shard, in C order: the numbers of the devices that hold it
    indices: tuple[tuple[int, ...], ...]  #: for each shard, in C order: its index in the grid

    def cut(self, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the shards of a whole array, in C order: contiguous, and views where that is possible."""
        n_axes = len(self.shape)
        pairs = [n for pair in zip(self.counts, self.shape, strict=True) for n in pair]
        order = (*range(0, 2 * n_axes, 2), *range(1, 2 * n_axes, 2))
        blocks = np.ascontiguousarray(array.reshape(pairs).transpose(order).reshape(-1, *self.shape))
        return list(blocks) if n_axes else [blocks.reshape(())]  # a list would be of numpy's scalars

    def on_devices(self, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return what each device is to hold of a whole array, each in separate memory."""
        shards = self.cut(array)
        if len(shards) == len(self.places):
            return [shards[at] for at in self.places]

        return [
            shards[at] if self.holders[at][0] == number else shards[at].copy()
            for number, at in enumerate(self.places)
        ]


@lru_cache(maxsize=1024)  # keeps no arrays alive, only meshes and devices, which live as long as the process
def shard_grid(sharding: Sharding, shape: tuple[int, ...]) -> ShardGrid | None:
    """Return how arrays of `shape` are divided; None if not evenly, or not wholly in this process."""
    if not sharding.is_fully_addressable or 0 in shape:
        return None

    part = sharding.shard_shape(shape)
    counts = tuple([size // n for size, n in zip(shape, part, strict=True)])
    indices = device_indices(sharding, shape)
    places: list[int] = []
    for index in indices.values():
        bounds = [along.indices(size)[:2] for along, size in zip(index, shape, strict=True)]
        if any(start % n or stop - start != n for (start, stop), n in zip(bounds, part, strict=True)):
            return None

        at = tuple([start // n for (start, _), n in zip(bounds, part, strict=True)])
        places.append(flat_index(at, counts))

    holders: list[list[int]] = [[] for _ in range(math.prod(counts))]
    for number, place in enumerate(places):
        holders[place].append(number)

    if not all(holders):
        return None

    return ShardGrid(
        part,
        counts,
        tuple(indices),
        tuple(places),
        tuple(map(tuple, holders)),
        tuple(itertools.product(*map(range, counts))),
    )
