"""Chooses how a leaf is stored, from its handler's description and the options. Pure.

`fitted` chooses dtype, codec and chunks.

Source:
    ORBAX_FORMAT.md §2.1 for the rules of `chunk_byte_size` and `shard_axes`; tests/interop compares the
    result with Orbax's own.
"""

from __future__ import annotations

__all__ = (
    "CODED_FROM",
    "fitted",
    "orbax_chunk_shape",
    "replica_shape",
    "roughly_equal_chunks",
    "split_among_replicas",
)

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from penstock.handlers.dtypes import dtype_name, numpy_dtype, storable
from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.save_format import SaveArgs, SaveFormat

CODED_FROM: Final = 16 * 1024
"""Smaller shards get no codec: it would cost more than it saves, and keep them out of packs."""

CODED_CHUNK: Final = 16 * 2**20
"""Default bytes of a chunk with a codec. Chunks are encoded whole, several at once."""

MOST_CODED: Final = 2**30
"""The most bytes of a chunk with a codec, whatever is asked for: Blosc takes less than twice as many."""

_NOTHING: Final = SaveArgs()


def fitted(
    spec: LeafSpec,
    key_path: str,
    form: SaveFormat,
    args: SaveArgs | None,
    coded_chunk: int = CODED_CHUNK,
    plain_chunk: int | None = None,
) -> LeafSpec:
    """Return `spec`, of an array, with the dtype, the chunk shape and the codec that it is stored with.

    Args:
        spec: As its handler described it.
        key_path: Of the leaf, for errors.
        form: What is asked for all leaves.
        args: What is asked for this one, if anything is.
        coded_chunk: Bytes of a chunk with a codec, about, if none are asked for.
        plain_chunk: Bytes of any other chunk, about, if none are asked for; None for no limit.

    Raises:
        InvalidLeafError: If `args` do not fit the leaf.
    """
    args = args or _NOTHING
    if args.dtype is not None:
        spec = _cast(spec, key_path, args.dtype)

    spec = _divided(spec, form)
    codec = form.leaf_codec if spec.chunk_nbytes >= CODED_FROM else None
    chunk_shape = _chunk_shape(spec, key_path, form, args)
    chunk_bytes = coded_chunk if codec else plain_chunk
    if chunk_bytes is not None and args.chunk_byte_size is None and form.chunk_byte_size is None:
        chunk_shape = roughly_equal_chunks(chunk_shape, spec.itemsize, chunk_bytes)
    if codec and math.prod(chunk_shape) * spec.itemsize > MOST_CODED:
        chunk_shape = roughly_equal_chunks(chunk_shape, spec.itemsize, MOST_CODED)
    if chunk_shape == spec.chunk_shape and codec == spec.codec:
        return spec  # the same object, because specs are compared by identity

    return replace(spec, chunk_shape=chunk_shape, codec=codec)


def _divided(spec: LeafSpec, form: SaveFormat) -> LeafSpec:
    """Give each replica of a shard its part to write, if that is asked for and worth it."""
    if not form.replica_parallel or spec.replicas.n == 1 or spec.write_shape is None:
        return spec

    most = form.replica_parallel_max_replicas
    part = replica_shape(spec.write_shape, min(spec.replicas.n, most or spec.replicas.n))
    if part is None or math.prod(part) * spec.itemsize < form.replica_parallel_min_bytes:
        return spec

    n_writers = math.prod(spec.write_shape) // math.prod(part)
    return replace(
        spec, write_shape=part, chunk_shape=part, replicas=replace(spec.replicas, n_writers=n_writers)
    )


def _cast(spec: LeafSpec, key_path: str, wanted: object) -> LeafSpec:
    try:
        dtype = np.dtype(wanted)  # type: ignore[call-overload]  # it may be anything; that is why it is tried
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidLeafError(key_path, f"save_args have no dtype {wanted!r}: {error}") from error

    name = dtype_name(dtype)
    if name == spec.dtype:
        return spec
    if spec.extended_dtype is not None:
        raise InvalidLeafError(key_path, f"a PRNG key cannot be cast to {name}")
    if not storable(name):
        raise InvalidLeafError(key_path, f"an array of dtype {name} cannot be stored")
    if numpy_dtype(spec.dtype).kind == "c" and dtype.kind != "c":
        raise InvalidLeafError(key_path, f"casting {spec.dtype} to {name} would drop the imaginary parts")

    return replace(spec, dtype=name, itemsize=dtype.itemsize)


def _chunk_shape(spec: LeafSpec, key_path: str, form: SaveFormat, args: SaveArgs) -> tuple[int, ...]:
    """Cut the chunks as requested."""
    shape, whole = spec.shape or (), spec.chunk_shape
    most = args.chunk_byte_size or form.chunk_byte_size
    if most is not None and most < spec.itemsize:
        problem = f"chunk_byte_size {most} is less than one element of {spec.dtype} takes"
        raise InvalidLeafError(key_path, problem)
    if any(not 0 <= axis < len(whole) for axis in args.shard_axes):
        raise InvalidLeafError(key_path, f"shard_axes {args.shard_axes} are not within shape {shape}")

    file_size = form.ocdbt_target_data_file_size if form.ocdbt else None
    if file_size and math.prod(whole) * spec.itemsize > file_size:  # a chunk is in one file
        most = max(spec.itemsize, min(most or file_size, file_size))
    if not spec.nbytes or (most is None and not args.shard_axes):
        return whole

    return orbax_chunk_shape(shape, whole, spec.itemsize, most, args.shard_axes)


_SMALLEST_PART: Final = 16
"""If equal chunks would each be below this part of the target size, one chunk above it is better."""


def orbax_chunk_shape(
    shape: Sequence[int],
    write_shape: Sequence[int],
    itemsize: int,
    chunk_byte_size: int | None,
    shard_axes: Sequence[int] = (),
) -> tuple[int, ...]:
    """Choose the chunk shape that Orbax would choose, axis by axis a divisor of `write_shape`.

    Axes in `shard_axes` are cut into single indices. Then, until a chunk fits, the longest axis shrinks
    to the next smaller divisor of what it was: of those that were cut before or by the sharding, then of
    all.

    Args:
        shape: Of the array.
        write_shape: Of the part that one replica writes.
        itemsize: Bytes of an element.
        chunk_byte_size: Bytes of a chunk, at most; at least `itemsize`. None: any.
        shard_axes: Within the rank.
    """
    divisors = [_divisors(size or 1) for size in write_shape]
    cut = [whole != (part or 1) for whole, part in zip(shape, write_shape, strict=True)]
    for axis in shard_axes:
        cut[axis] = cut[axis] or len(divisors[axis]) > 1
        divisors[axis] = [1]

    sizes = [of_axis[-1] for of_axis in divisors]
    most = math.prod(sizes) if chunk_byte_size is None else chunk_byte_size // itemsize
    while math.prod(sizes) > most:
        candidates = [axis for axis, size in enumerate(sizes) if cut[axis] and size > 1]
        if not candidates:
            cut = [True] * len(sizes)
            continue

        axis = max(candidates, key=sizes.__getitem__)  # of equals, the first
        divisors[axis].pop()
        sizes[axis] = divisors[axis][-1]

    return tuple(sizes)


def replica_shape(shard_shape: Sequence[int], n_replicas: int) -> tuple[int, ...] | None:
    """Choose the part of a shard that each of its replicas writes, as Orbax would.

    The first axis that their number divides is cut into that many parts; None if there is no such axis.
    Replica k writes part k. A shard without elements is not cut.
    """
    if 0 in shard_shape:
        return None

    axis = next((at for at, size in enumerate(shard_shape) if size % n_replicas == 0), None)
    if axis is None:
        return None

    return (*shard_shape[:axis], shard_shape[axis] // n_replicas, *shard_shape[axis + 1 :])


def roughly_equal_chunks(write_shape: Sequence[int], itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    """Choose a chunk shape of at most about `chunk_bytes`, near to it; larger where axes have no divisors.

    Each step cuts the axis that can be cut into the fewest parts, the first of equals: so most chunks
    are contiguous in the shard.
    """
    divisors = [_divisors(size or 1) for size in write_shape]
    sizes = [of_axis[-1] for of_axis in divisors]
    while math.prod(sizes) * itemsize > chunk_bytes:
        steps = [(size / divisors[axis][-2], axis) for axis, size in enumerate(sizes) if size > 1]
        factor, axis = min(steps, default=(math.inf, 0))
        if math.prod(sizes) * itemsize / factor < chunk_bytes / _SMALLEST_PART:
            break

        divisors[axis].pop()
        sizes[axis] = divisors[axis][-1]

    return tuple(sizes)


def _divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def split_among_replicas(spec: LeafSpec) -> LeafSpec:
    """Return the spec with its shards split along the first axis that the number of replicas divides.

    Without such an axis, without replicas, and for anything but a jax.Array, it is returned as it is.
    """
    shard = spec.write_shape
    if spec.replicas.n == 1 or shard is None or spec.nbytes == 0 or spec.chunk_shape != shard:
        return spec

    part = replica_shape(shard, spec.replicas.n)
    return spec if part is None else replace(spec, chunk_shape=part, write_shape=part)
