"""Stages jax.Arrays: cut as Orbax cuts them, brought to the host by penstock's own handler."""

from __future__ import annotations

__all__ = ("ReplicaOptions", "Staged", "stage", "write_shape_of")

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import jax
import numpy as np

from penstock.handlers.coordinators.jax_processes import processes_of_jax
from penstock.handlers.dtypes import dtype_name, numpy_dtype
from penstock.handlers.leaves.array import ArrayHandler
from penstock.handlers.leaves.devices import device_indices
from penstock.kernel.messages.save import Leaf
from penstock.kernel.protocols.leaf import KeyKind
from penstock.kernel.protocols.leaf import ParamInfo as KernelInfo
from penstock.orbax.common.array_metadata_store import RANDOM_KEY_IMPL, ArrayMetadata
from penstock.orbax.common.leaf_args import ParamInfo, SaveArgs
from penstock.orbax.v0.leaf_handlers.array_io import Written
from penstock.orbax.v0.leaf_handlers.tensorstore_specs import (
    array_write_spec,
    chunk_shape_for,
    process_directory,
)

_WHOLE = 1 << 62  # bytes of a piece: whole chunks, which TensorStore takes as they are


@final
@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How the replicas of an array share the work of writing it: the options of `ArrayHandler`."""

    parallel: bool = True
    min_slice_bytes: int | None = None
    max_replicas: int | None = None
    separate_folder: bool = False


@final
@dataclass(frozen=True, slots=True)
class Staged:
    """An array on the host."""

    array: Written
    sharding: str | None  #: as it is recorded
    metadata: ArrayMetadata


def stage(
    values: Sequence[jax.Array],
    infos: Sequence[ParamInfo],
    args: Sequence[SaveArgs],
    options: ReplicaOptions,
    metadata_key: str | None,
) -> list[Staged]:
    """Bring arrays to the host. Blocking; when it returns they may be deleted or donated.

    On CPU devices nothing is copied: the memory of an array that is looked at is not reused.

    Raises:
        DeletedLeafError: If one is gone.
        InvalidLeafError: If one cannot be stored.
    """
    return [
        _staged(value, info, arg, options, metadata_key)
        for value, info, arg in zip(values, infos, args, strict=True)
    ]


def write_shape_of(value: jax.Array, options: ReplicaOptions) -> tuple[int, ...]:
    """Return the shape of the part of a shard that one of its replicas writes.

    The first axis that all replicas divide is cut into as many parts; a shard without such an axis, or
    of parts that would be too small, is written whole.

    Source:
        ORBAX_FORMAT.md §2.1.
    """
    shape = tuple(value.sharding.shard_shape(value.shape))
    if not options.parallel or not math.prod(shape):
        return shape

    held = Counter(map(str, device_indices(value.sharding, value.shape).values()))
    replicas = min(held.values())
    if options.max_replicas is not None:
        replicas = min(replicas, options.max_replicas)

    axis = next((at for at, size in enumerate(shape) if size % max(replicas, 1) == 0), None)
    if replicas <= 1 or axis is None:
        return shape

    part = (*shape[:axis], shape[axis] // replicas, *shape[axis + 1 :])
    return shape if math.prod(part) * value.dtype.itemsize < (options.min_slice_bytes or 0) else part


def _staged(
    value: jax.Array, info: ParamInfo, arg: SaveArgs, options: ReplicaOptions, metadata_key: str | None
) -> Staged:
    handler = ArrayHandler()
    place = KernelInfo((info.name,), (KeyKind.MAPPING,), info.name)
    spec = handler.describe(value, place)
    data = value if spec.random_key_impl is None else jax.random.key_data(value)
    database = bool(info.is_ocdbt_checkpoint)
    write_shape = write_shape_of(data, options)
    dtype = np.dtype(data.dtype if arg.dtype is None else arg.dtype)
    shape = spec.shape or ()
    chunk_shape = chunk_shape_for(
        info, use_ocdbt=database, shape=shape, write_shape=write_shape, dtype=dtype, arg=arg
    )
    spec = replace(spec, chunk_shape=chunk_shape, dtype=dtype_name(dtype), itemsize=dtype.itemsize)
    leaf = Leaf(0, place, value, spec, handler)
    parts = [
        (_place(plan.chunk, chunk_shape), _elements(plan.take(), spec.dtype, chunk_shape))
        for plan in handler.pieces(leaf, _WHOLE)
    ]
    separate = options.separate_folder and options.parallel and database and _is_replicated(data.sharding)
    # Cast on the way to the host, so TensorStore is given what is stored.
    written = array_write_spec(
        info,
        use_ocdbt=database,
        shape=shape,
        chunk_shape=chunk_shape,
        dtype=dtype,
        process=process_directory(processes_of_jax()[0], replicas=separate) if database else None,
        metadata_key=metadata_key,
    )
    extra = {RANDOM_KEY_IMPL: spec.random_key_impl} if spec.random_key_impl else None
    metadata = ArrayMetadata(
        info.name, shape, dtype, write_shape, chunk_shape, database, bool(info.use_zarr3), extra
    )
    return Staged(Written(info, written, parts), spec.sharding, metadata)


def _place(chunk: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple([slice(at * size, (at + 1) * size) for at, size in zip(chunk, shape, strict=True)]) or (...,)


def _elements(data: memoryview, dtype: str, shape: tuple[int, ...]) -> Any:
    # A view: it keeps the memory, and what holds that, alive.
    return np.frombuffer(data, np.uint8).view(numpy_dtype(dtype)).reshape(shape)


def _is_replicated(sharding: Any) -> bool:
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = cast("Sequence[object]", tuple(sharding.spec))
        return len(sharding.mesh.axis_names) > len(spec) or not spec or None in spec

    return isinstance(sharding, jax.sharding.SingleDeviceSharding)
