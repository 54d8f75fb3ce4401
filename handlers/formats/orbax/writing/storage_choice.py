"""Chooses how a leaf is stored, from its handler's description and the options. Pure."""

from __future__ import annotations

__all__ = ("CODED_FROM", "fitted")

import math
from dataclasses import replace
from typing import Final

import numpy as np

from penstock.handlers.dtypes import dtype_name, numpy_dtype, storable
from penstock.handlers.formats.orbax.writing.chunk_shapes import (
    orbax_chunk_shape,
    replica_shape,
    roughly_equal_chunks,
)
from penstock.kernel.config.save_format import SaveArgs, SaveFormat
from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.protocols.leaf import LeafSpec

CODED_FROM: Final = 16 * 1024
"""Smaller shards get no codec: it would cost more than it saves, and keep them out of packs."""

CODED_CHUNK: Final = 16 * 2**20
"""Default bytes of a chunk with a codec. Chunks are encoded whole, several at once."""

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
        coded_chunk: Bytes of a chunk with a codec, about, if nobody asks for any.
        plain_chunk: Bytes of any other chunk, about, if nobody asks for any; None for no limit.

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
    if chunk_shape == spec.chunk_shape and codec == spec.codec:
        return spec  # the same object, because specs are compared by identity

    return replace(spec, chunk_shape=chunk_shape, codec=codec)


def _divided(spec: LeafSpec, form: SaveFormat) -> LeafSpec:
    """Give each replica of a shard its part to write, if that is asked for and worth it."""
    if not form.replica_parallel or spec.n_replicas == 1 or spec.write_shape is None:
        return spec

    most = form.replica_parallel_max_replicas
    part = replica_shape(spec.write_shape, min(spec.n_replicas, most or spec.n_replicas))
    if part is None or math.prod(part) * spec.itemsize < form.replica_parallel_min_bytes:
        return spec

    n_writers = math.prod(spec.write_shape) // math.prod(part)
    return replace(spec, write_shape=part, chunk_shape=part, n_writers=n_writers)


def _cast(spec: LeafSpec, key_path: str, wanted: object) -> LeafSpec:
    try:
        dtype = np.dtype(wanted)  # type: ignore[call-overload]  # it may be anything; that is why it is tried
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidLeafError(key_path, f"save_args have no dtype {wanted!r}: {error}") from error

    name = dtype_name(dtype)
    if name == spec.dtype:
        return spec
    if spec.random_key_impl is not None:
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
    if file_size and math.prod(whole) * spec.itemsize > file_size:  # a chunk lies in one file
        most = max(spec.itemsize, min(most or file_size, file_size))
    if not spec.nbytes or (most is None and not args.shard_axes):
        return whole

    return orbax_chunk_shape(shape, whole, spec.itemsize, most, args.shard_axes)
