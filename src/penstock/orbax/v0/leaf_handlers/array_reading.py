"""Reads jax.Arrays: into memory from which penstock's own handler makes arrays."""

from __future__ import annotations

__all__ = ("Wanted", "read_array", "wanted_of")

from dataclasses import dataclass
from typing import Any, cast, final

import jax
import numpy as np
import tensorstore as ts

from penstock.handlers.dtypes import dtype_name
from penstock.handlers.leaves.common.host_buffers import HostRegion
from penstock.handlers.leaves.jax_arrays.placement import Placement, make_arrays, split
from penstock.handlers.leaves.jax_arrays.prng_keys import is_key
from penstock.kernel.concurrency.threads import await_future
from penstock.kernel.messages.packs import ReadLeaf
from penstock.kernel.protocols.leaf import KeyKind, LeafSpec, StoredLeaf
from penstock.kernel.protocols.leaf import ParamInfo as KernelInfo
from penstock.kernel.protocols.reads import Target
from penstock.orbax.common.background_work import blaming, in_thread, reserved
from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs

_ts: Any = ts  # its stubs use names that they do not define
_jax: Any = jax


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """The requested form of an array."""

    sharding: jax.sharding.Sharding
    format: Any = None  #: a jax `Format`, for a memory layout other than the default
    shape: tuple[int, ...] | None = None  #: of the data; None for the stored shape
    strict: bool = True  #: whether a shape other than the stored one is an error


def wanted_of(arg: RestoreArgs, sharding: Any, info: ParamInfo) -> Wanted:
    """Combine the request of a leaf.

    Args:
        arg: The restore args of the leaf; typed keys are requested by their own shape.
        sharding: Of jax, or a `Format` that has one.
        info: Of the leaf.

    Raises:
        ValueError: If no sharding can be made of it.
    """
    inner = sharding if isinstance(sharding, jax.sharding.Sharding) else getattr(sharding, "sharding", None)
    if not isinstance(inner, jax.sharding.Sharding):
        problem = f"the leaf {info.name!r} cannot be restored with the sharding {sharding!r}"
        raise ValueError(problem)  # the kind that Orbax raises

    shape = getattr(arg, "global_shape", None)
    if shape is not None and arg.dtype is not None and is_key(arg.dtype):
        struct = _jax.eval_shape(jax.random.key_data, _jax.ShapeDtypeStruct(tuple(shape), arg.dtype))
        inner = _also_along(inner, len(struct.shape) - len(shape))
        shape = struct.shape

    return Wanted(
        inner,
        None if isinstance(sharding, jax.sharding.Sharding) else sharding,
        None if shape is None else tuple(shape),
        getattr(arg, "strict", True),
    )


async def read_array(store: Any, info: ParamInfo, wanted: Wanted, key_impl: str | None) -> Any:
    """Read the parts that devices of this process need, each once, and make the array.

    Args:
        store: The opened array, cast already.
        info: Of the leaf.
        wanted: Its requested form.
        key_impl: The implementation to wrap the data of typed PRNG keys with.

    Raises:
        ValueError: If the shape is not the stored one, or the sharding does not divide it.
    """
    stored = tuple(store.shape)
    shape = stored if wanted.shape is None else wanted.shape
    if wanted.strict and shape != stored:
        raise ValueError(
            f"the leaf {info.name!r} has the shape {stored}, and {shape} is asked for; "
            f"strict=False pads with zeros and cuts off"
        )
    if len(shape) != len(stored):
        raise ValueError(f"the leaf {info.name!r} has {len(stored)} axes, and {len(shape)} are asked for")

    dtype = np.dtype(store.dtype.numpy_dtype)
    regions = tuple([HostRegion(bounds, dtype) for bounds in split(wanted.sharding, shape)])
    async with reserved(info.byte_limiter, sum([region.nbytes for region in regions])):
        await _fill(store, info, regions)
        place = KernelInfo((info.name,), (KeyKind.MAPPING,), info.name)
        spec = LeafSpec("jax.Array", shape, dtype_name(dtype), dtype.itemsize, shape)
        staging = 0 if Placement(wanted.sharding).keeps_regions else sum([r.nbytes for r in regions])
        target = Target(regions, staging, Placement(wanted.sharding, key_impl=key_impl))
        leaf = ReadLeaf(0, StoredLeaf(place, spec), cast("Any", None), target)
        (array,) = await in_thread(make_arrays, [leaf])
        if wanted.format is not None:
            array = await in_thread(_jax.device_put, array, wanted.format)

    return array


def _also_along(sharding: jax.sharding.Sharding, axes: int) -> jax.sharding.Sharding:
    """The sharding of data with more trailing axes than what was sharded."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding

    spec = _jax.sharding.PartitionSpec(*sharding.spec, *[None] * axes)
    return jax.sharding.NamedSharding(cast("Any", sharding.mesh), spec)


async def _fill(store: Any, info: ParamInfo, regions: tuple[HostRegion, ...]) -> None:
    writes: list[Any] = []
    for region in regions:
        array = region.array()
        starts = [start for start, _ in region.bounds]
        stops = [min(stop, size) for (_, stop), size in zip(region.bounds, store.shape, strict=True)]
        if stops != [stop for _, stop in region.bounds]:
            array[...] = 0
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            continue

        inner = tuple([slice(0, stop - start) for start, stop in zip(starts, stops, strict=True)]) or (...,)
        outer = tuple([slice(start, stop) for start, stop in zip(starts, stops, strict=True)]) or (...,)
        # Zeros as origin on both sides: TensorStore matches domains by position in the array.
        source = store[outer] if inner == (...,) else store[outer][_ts.d[:].translate_to[0]]
        writes.append(_ts.array(array)[inner].write(source).commit)

    with blaming(info):
        for future in writes:
            await await_future(future)
