"""Leaves that are jax.Arrays, of any sharding."""

from __future__ import annotations

__all__ = ("ArrayHandler",)

import math
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast, final

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from penstock.handlers.dtypes import dtype_name, storable
from penstock.handlers.leaves.device_assembly import canvas_parts, join_parts, place_part
from penstock.handlers.leaves.devices import on_host
from penstock.handlers.leaves.prng_keys import is_key, key_data_of, key_impl_of
from penstock.handlers.leaves.restore_target import array_target, make_arrays
from penstock.handlers.leaves.sharding import encode
from penstock.handlers.leaves.shards import (
    PACKED,
    ShardGrid,
    parts_here,
    processes_of,
    shard_grid,
    shard_pieces,
)
from penstock.handlers.leaves.small_arrays import make_small
from penstock.handlers.leaves.stored_value import targets_by_kind, type_name
from penstock.kernel.errors import DeletedLeafError, InvalidLeafError, TreeDifference
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, Replicas, StoredLeaf, StoredRows
from penstock.kernel.protocols.leaf_handlers import Leaf, ReadLeaf, ReadLeaves
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.written import PiecePlan

_BUFFERED: Final = frozenset(
    {"bool", "float16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""The dtypes for which jax exports the memory of a CPU array as a buffer."""


@final
@dataclass(frozen=True, slots=True)
class ArrayHandler:
    """Stores each distinct shard of a jax.Array as one or more chunks, and typed PRNG keys as their key data.

    jax.Arrays are immutable, so nothing is copied on CPU devices: pieces are views of the arrays' own
    memory, which the runtime neither frees nor reuses while a piece lives. From other devices, one
    piece is copied at a time, so host memory is bounded by the pieces in flight.

    Args:
        alias_host: Whether pieces may be views of the memory of CPU devices, and restored arrays may keep
            the memory they were read into. If False, CPU devices are copied from and to like any other.
        described: Takes the spec that `describe` made and the key path; returns the spec to store instead.
    """

    typestr: str = "jax.Array"
    alias_host: bool = True
    described: Callable[[LeafSpec, str], LeafSpec] | None = None

    follows_spec = True  #: shards are cut and cast as the spec says
    immutable = True  #: the bytes of a jax.Array never change

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        """Return the specs to store: the shard shape is the chunk and write shape, the sharding a text.

        Shape, dtype and sharding are all that one depends on. Does not wait for an array to be computed.

        Raises:
            DeletedLeafError: If an array is deleted or donated.
            InvalidLeafError: If one is abstract, traced, or has a dtype that cannot be stored.
        """
        specs: list[LeafSpec] = []
        concrete: type | None = None
        for number, value in enumerate(values):
            if type(value) is not concrete:  # mostly all are of one class, which jax takes long to tell
                if not isinstance(value, jax.Array) or isinstance(value, Tracer):
                    raise InvalidLeafError(infos[number].key_path, _not_concrete(cast("object", value)))

                concrete = type(value)

            if value.is_deleted():
                raise DeletedLeafError(infos[number].key_path)

            kind = value.shape, cast("object", value.dtype), value.sharding
            spec = known.get(kind)
            if spec is None:
                spec = known[kind] = self._spec(value, infos[number])

            specs.append(spec)

        return specs

    def _spec(self, value: jax.Array, info: ParamInfo) -> LeafSpec:
        dtype = cast("object", value.dtype)  # for typed keys not an np.dtype, despite the annotation
        key_impl: str | None = None
        if is_key(dtype):
            key_impl, value = key_impl_of(value, info), key_data_of(value)
        elif not isinstance(dtype, np.dtype):
            raise InvalidLeafError(info.key_path, _not_storable(str(dtype)))

        name = dtype_name(value.dtype)
        if not storable(name):
            raise InvalidLeafError(info.key_path, _not_storable(name))

        sharding = value.sharding
        shard_shape = sharding.shard_shape(value.shape)
        spec = LeafSpec(
            self.typestr,
            value.shape,
            name,
            value.dtype.itemsize,
            tuple([size or 1 for size in shard_shape]),
            shard_shape,
            sharding=encode(sharding),
            extended_dtype=key_impl,
            replicas=Replicas(
                _n_replicas(sharding.num_devices, value.shape, shard_shape),
                is_global=not value.is_fully_addressable,
            ),
        )
        return spec if self.described is None else self.described(spec, info.key_path)

    def nbytes_here(self, value: Any, spec: LeafSpec) -> int:
        """Return how many bytes of an array that is spread over processes this one writes."""
        array = cast("jax.Array", value if spec.extended_dtype is None else key_data_of(value))
        part = spec.write_shape or spec.chunk_shape
        return (
            len(parts_here(array.sharding, array.shape, part, spec.replicas.writer))
            * math.prod(part)
            * spec.itemsize
        )

    def processes_of(self, value: Any) -> AbstractSet[int]:
        """Return the processes whose devices hold parts of the array."""
        return processes_of(cast("jax.Array", value).sharding)

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        """Plan the pieces of every distinct shard. Only `take` waits and touches memory.

        The first `take` of a shard on a CPU device protects the whole shard from donation and deletion.
        On other devices each piece is protected once it is taken.
        """
        spec = leaf.spec
        value = cast("jax.Array", leaf.value)
        if value.is_deleted():
            raise DeletedLeafError(leaf.info.key_path)
        if not spec.nbytes:
            return iter(())

        return shard_pieces(
            value if spec.extended_dtype is None else key_data_of(value),
            spec,
            piece_bytes,
            key_path=leaf.info.key_path,
            alias=self.alias_host,
        )

    def chunk_buffers(self, values: Sequence[Any], spec: LeafSpec) -> Sequence[Any]:
        """The arrays or NumPy views of them, if CPU devices hold their bytes as stored; else None.

        Of an array on several devices, a copy of its distinct shards, if they are its chunks.
        """
        first = cast("jax.Array", values[0])  # the others have its dtype and sharding
        if first.sharding.num_devices != 1 or not spec.is_single_chunk:
            return self._joined_shards(values, spec)
        if not self._is_laid_out_as_stored(first, spec):
            return [None] * len(values)

        # The array itself costs half as much as a numpy view, but only these dtypes have a buffer format.
        return values if spec.dtype in _BUFFERED else [np.asarray(value) for value in values]

    def _joined_shards(self, values: Sequence[Any], spec: LeafSpec) -> Sequence[Any]:
        """Return copies of each array's shards, where they are its chunks and are held as they are stored."""
        buffers: list[Any] = []
        sharding: Sharding | None = None
        grid: ShardGrid | None = None
        for value in cast("Sequence[jax.Array]", values):
            if value.sharding is not sharding:
                sharding = value.sharding
                grid = shard_grid(sharding, value.shape) if self._is_laid_out_as_stored(value, spec) else None
            if grid is None or grid.shape != spec.chunk_shape:
                buffers.append(None)
                continue

            shards: list[Any] = [value.addressable_data(holders[0]) for holders in grid.holders]
            # Joined at once: each shard is an object, at which the garbage collector would look.
            if spec.dtype not in _BUFFERED:
                shards = [np.asarray(shard) for shard in shards]

            buffers.append(b"".join(shards))

        return buffers

    def _is_laid_out_as_stored(self, array: jax.Array, spec: LeafSpec) -> bool:
        """Return whether CPU devices hold its elements in the byte order and layout of storage."""
        return (
            self.alias_host
            and spec.extended_dtype is None
            and spec.dtype not in PACKED
            and spec.dtype == dtype_name(array.dtype)
            and on_host(array.sharding)
        )

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        """Decide where to place each array, and read each distinct shard once.

        * `like` is a `jax.Array`: the result has its shape, dtype and sharding, and is uncommitted if it
          is. It may have been donated. A `jax.ShapeDtypeStruct` with a sharding works the same way, but
          the result is committed.
        * `like` is the type, or a struct without a sharding: the result has the saved sharding if all its
          devices exist here. Otherwise it is uncommitted on jax's default device. An array that was saved
          from the default device alone is uncommitted, too, as nearly every array is that was never placed
          explicitly.
        * No target: the same, except that the result is an np.ndarray if the array was spread over devices
          that do not exist here, or if jax does not allow its 64-bit type now.

        Nothing is ever cast. Raw uint32 data can be restored as typed keys, and typed keys as raw data,
        because the bits are the same.

        Raises:
            UnsupportedFormatError: If this process does not know the stored dtype or PRNG implementation.
        """
        return targets_by_kind(stored, likes, _target_kind, partial(array_target, alias=self.alias_host))

    def parts(
        self, stored: StoredLeaf, target: Target, part_bytes: int, *, whole_chunks: bool
    ) -> Sequence[Target]:
        """Cut an array that is copied to devices into parts; no parts if it keeps the regions' memory."""
        return canvas_parts(stored, target, part_bytes, whole_chunks=whole_chunks)

    def place(self, part: ReadLeaf) -> None:
        """Copy a part to its devices, and write it into the array that is being assembled there."""
        place_part(part)

    def join(self, part: ReadLeaf) -> Any:
        """Return the array, after all its parts were placed."""
        return join_parts(part)

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        """Make the arrays. On CPU devices they live in the regions' memory and may still be donated.

        Those that share a buffer get memory of their own.
        """
        return make_arrays(leaves) if leaves.shared is None else make_small(leaves.shared, leaves.details)


def _target_kind(like: Any) -> object:
    """Return what `array_target` depends on. Objects that are named by their ids live as long as `like`."""
    # Shardings by value: each array may have its own object, and arrays of one target are made in one step.
    if isinstance(like, jax.Array):
        # One that is uncommitted goes to jax's default device, wherever it is. Each has its own sharding, and
        # a decision for each would take as long as all else of a restore.
        place = like.sharding if like.committed else None
        return like.shape, id(like.dtype), place, id(type(like))
    if type(like) is jax.ShapeDtypeStruct:
        return like.shape, id(like.dtype), like.sharding

    return id(like)


def _n_replicas(n_devices: int, shape: tuple[int, ...], shard_shape: tuple[int, ...]) -> int:
    """Count the devices that hold each shard; 1 for an array without elements."""
    if n_devices == 1 or 0 in shape:
        return 1

    return n_devices // math.prod([size // part for size, part in zip(shape, shard_shape, strict=True)])


def _not_concrete(value: object) -> str:
    if isinstance(value, jax.ShapeDtypeStruct):
        return "the array is abstract (a jax.ShapeDtypeStruct): it has no values to save"
    if isinstance(value, Tracer):
        return "the array is a tracer: save outside of jit, grad, vmap and scan"

    return f"a {type_name(value)} is no jax.Array"


def _not_storable(dtype: str) -> str:
    wider = {"uint4": "uint8", "uint2": "uint8", "float8_e4m3": "float8_e4m3fn or bfloat16"}
    return (
        f"an array of dtype {dtype} cannot be stored; convert it to {wider.get(dtype, 'a wider type')} first"
    )
