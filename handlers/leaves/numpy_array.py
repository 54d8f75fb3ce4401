"""Leaves that are numpy arrays."""

from __future__ import annotations

__all__ = ("NumpyHandler",)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.dtypes import dtype_name, numpy_dtype, storable
from penstock.handlers.leaves.blocks import (
    Box,
    HostRegion,
    cast_to,
    chunk_boxes,
    shared_views,
    stored_as,
)
from penstock.handlers.leaves.stored_value import (
    different,
    different_array,
    stored_dtype,
    targets_by_kind,
    type_name,
)
from penstock.kernel.errors import InvalidLeafError, TreeDifference
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf, StoredRows
from penstock.kernel.protocols.leaf_handlers import Leaf, ReadLeaves
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.written import PiecePlan


@final
@dataclass(frozen=True, slots=True)
class NumpyHandler:
    """Stores an `np.ndarray` as one chunk, in C order and little-endian.

    Every piece is a copy, because the caller may change the array after it was staged.
    """

    typestr: str = "np.ndarray"

    follows_spec = True  #: arrays are cut and cast as the spec says

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        """Return the specs to store for ndarrays of any strides and byte order, by shape and dtype.

        Raises:
            InvalidLeafError: If a value is of a subclass of ndarray, or its dtype cannot be stored.
        """
        specs: list[LeafSpec] = []
        for number, value in enumerate(values):
            if type(value) is not np.ndarray:
                raise InvalidLeafError(infos[number].key_path, _no_plain_array(value))

            array: npt.NDArray[Any] = value
            kind = array.shape, array.dtype
            spec = known.get(kind)
            if spec is None:
                name = dtype_name(array.dtype)
                if not storable(name):
                    raise InvalidLeafError(infos[number].key_path, _not_storable(array.dtype))

                chunk_shape = tuple([size or 1 for size in array.shape])
                spec = LeafSpec(self.typestr, array.shape, name, array.dtype.itemsize, chunk_shape)
                known[kind] = spec

            specs.append(spec)

        return specs

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        """Plan copies in C order; each costs its bytes. An array without elements has no pieces."""
        array, spec = cast("npt.NDArray[Any]", leaf.value), leaf.spec
        dtype, itemsize = stored_as(spec.dtype), spec.itemsize
        for chunk, box in chunk_boxes(array.shape, spec.chunk_shape, max(1, piece_bytes // itemsize)):
            nbytes = box.n_elements * itemsize
            take = partial(_copied, array, box, dtype)
            yield PiecePlan(chunk, box.first * itemsize, nbytes, nbytes, take)

    def chunk_buffers(self, values: Sequence[Any], spec: LeafSpec) -> Sequence[Any]:
        """Arrays themselves if their memory holds the stored bytes: C order, native byte order, no cast.

        Of an array in several chunks, a copy in their order.
        """
        arrays = cast("Sequence[npt.NDArray[Any]]", values)
        wanted = numpy_dtype(spec.dtype)
        plain = [array if array.flags.c_contiguous and array.dtype == wanted else None for array in arrays]
        if spec.is_single_chunk:
            return plain

        return [None if array is None else _in_chunks(array, spec) for array in plain]

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        """Accept ndarrays of the stored shapes and dtypes (in either byte order), or their type.

        A stored jax.Array is restored whole on the host, and typed PRNG keys as their key data.
        """
        return targets_by_kind(stored, likes, _target_kind, _target)

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        """Return writable, aligned arrays in native byte order: the regions' memory, or a copy of shared.

        Of a mapped file the shared memory itself, which is read-only.
        """
        if leaves.shared is not None:
            views = shared_views(leaves.shared)
            return list(views) if leaves.shared.buffer.data.readonly else [view.copy() for view in views]

        return [cast("HostRegion", leaf.target.regions[0]).array() for leaf in leaves]


def _target_kind(like: Any) -> object:
    """Return what `_target` depends on. Plain arrays are alike if shape and dtype are."""
    return (like.shape, id(like.dtype)) if type(like) is np.ndarray else id(like)


def _target(stored: StoredLeaf, like: Any) -> Target | TreeDifference:
    if isinstance(like, np.ndarray):
        found = different_array(stored, like, lambda _: "np.ndarray")
        if found is not None:
            return found

    if stored.spec.shape is None:
        return different("type", stored, "np.ndarray")

    return Target((HostRegion.whole(stored.spec.shape, stored_dtype(stored)),), packable=True)


def _in_chunks(array: npt.NDArray[Any], spec: LeafSpec) -> npt.NDArray[Any] | None:
    """Return a copy with chunk after chunk; None if chunks jut out of the array."""
    grid, chunk = spec.grid_shape, spec.chunk_shape
    if tuple([n * size for n, size in zip(grid, chunk, strict=True)]) != array.shape:
        return None

    n_axes = len(grid)
    divided = array.reshape([n for pair in zip(grid, chunk, strict=True) for n in pair])
    order = (*range(0, 2 * n_axes, 2), *range(1, 2 * n_axes, 2))
    return np.ascontiguousarray(divided.transpose(order))


def _copied(array: npt.NDArray[Any], box: Box, dtype: np.dtype[Any]) -> memoryview:
    return cast_to(array[box.slices], dtype, copy=True).reshape(-1).view(np.uint8).data


def _no_plain_array(value: object) -> str:
    name = type_name(value)
    if isinstance(value, np.ma.MaskedArray):
        return f"a {name} would lose its mask; save value.data and value.mask as two leaves"

    return f"a {name} would come back as a plain np.ndarray; save np.asarray(value), or register a handler"


def _not_storable(dtype: np.dtype[Any]) -> str:
    what = f"an array of dtype {dtype} cannot be stored; "
    if dtype.names is not None:
        return what + "save its fields as separate leaves"

    match dtype.kind:
        case "O":
            return what + "make it a list of leaves, or an array of numbers"
        case "U" | "S" | "T":
            return what + "save a list of str leaves, or the bytes as uint8"
        case "M" | "m":
            return what + "save value.view(np.int64)"
        case _:
            return what + "convert it with .astype() to a dtype that can, such as float32 or int8"
