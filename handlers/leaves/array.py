"""Leaves that are jax.Arrays, of any sharding over the devices of this process."""

from __future__ import annotations

__all__ = ("ArrayHandler",)

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, final

import jax
import numpy as np
from jax.core import Tracer

from penstock.handlers.dtypes import dtype_name, storable
from penstock.handlers.leaves.common.mismatches import type_name
from penstock.handlers.leaves.jax_arrays.device_assembly import canvas_parts, join_parts, place_part
from penstock.handlers.leaves.jax_arrays.devices import on_host
from penstock.handlers.leaves.jax_arrays.placement import make_arrays
from penstock.handlers.leaves.jax_arrays.prng_keys import is_key, key_data_of, key_impl_of
from penstock.handlers.leaves.jax_arrays.restore_target import array_target
from penstock.handlers.leaves.jax_arrays.sharding import encode
from penstock.handlers.leaves.jax_arrays.shards import PACKED, shard_pieces
from penstock.handlers.leaves.jax_arrays.small_arrays import make_pack, pack_placements
from penstock.kernel.errors import DeletedLeafError, InvalidLeafError, TreeDifference
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.views import FilledLeaf, FilledPack, StagedLeaf
from penstock.kernel.protocols.written import PiecePlan

_BUFFERED: Final = frozenset(
    {"bool", "float16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""The dtypes of which jax exports the memory of a CPU array as a buffer."""


@final
@dataclass(frozen=True, slots=True)
class ArrayHandler:
    """Stores each distinct shard of a jax.Array as one chunk or several; typed PRNG keys as their key data.

    jax.Arrays are immutable, so on CPU devices nothing is copied: pieces look at the arrays' own
    memory, which the runtime neither frees nor reuses while a piece lives. From other devices a
    piece at a time is copied, so that host memory is bounded by the pieces in flight.

    Args:
        alias_host: Whether pieces may look at the memory of CPU devices, and restored arrays may keep the
            memory that was read into. If not, both are copied as from and to any other device.
        described: Returns what is stored instead of what `describe` would say, given that and the key path.
    """

    typestr: str = "jax.Array"
    alias_host: bool = True
    described: Callable[[LeafSpec, str], LeafSpec] | None = None

    @property
    def follows_spec(self) -> bool:
        """Yes: shards are cut and cast as the spec says."""
        return True

    @property
    def immutable(self) -> bool:
        """Yes: a jax.Array that is the same object has the same bytes."""
        return True

    def describe(self, value: Any, info: ParamInfo) -> LeafSpec:
        """Say what would be stored: shard shape as chunk and write shape, sharding as text.

        Does not wait for the array to be computed.

        Raises:
            DeletedLeafError: If it is deleted or donated.
            InvalidLeafError: If it is abstract, traced, not wholly in this process, or of a dtype that
                cannot be stored.
        """
        if not isinstance(value, jax.Array) or isinstance(value, Tracer):
            raise InvalidLeafError(info.key_path, _not_concrete(cast("object", value)))
        if value.is_deleted():
            raise DeletedLeafError(info.key_path)

        dtype = cast("object", value.dtype)  # of keys it is no np.dtype, whatever its annotation says
        if isinstance(dtype, np.dtype):
            return self._spec(value, info, None)
        if is_key(dtype):
            return self._spec(key_data_of(value), info, key_impl_of(value, info))

        raise InvalidLeafError(info.key_path, _not_storable(str(dtype)))

    def _spec(self, value: jax.Array, info: ParamInfo, key_impl: str | None) -> LeafSpec:
        if not value.is_fully_addressable:
            raise InvalidLeafError(
                info.key_path,
                "the array has shards on other processes, and saving from several processes "
                "is not supported yet; gather it first",
            )

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
            random_key_impl=key_impl,
            n_replicas=_n_replicas(sharding.num_devices, value.shape, shard_shape),
        )
        return spec if self.described is None else self.described(spec, info.key_path)

    def pieces(self, leaf: StagedLeaf, piece_bytes: int) -> Iterator[PiecePlan]:
        """Plan the pieces of every distinct shard. Waits for nothing and touches no memory: `take` does.

        The first `take` of a shard on a CPU device secures all of it against donation and deletion.
        Elsewhere each piece is secure once it is taken.
        """
        spec = leaf.spec
        value = cast("jax.Array", leaf.value)
        if value.is_deleted():
            raise DeletedLeafError(leaf.info.key_path)
        if not spec.nbytes:
            return iter(())

        return shard_pieces(
            value if spec.random_key_impl is None else key_data_of(value),
            spec,
            piece_bytes,
            key_path=leaf.info.key_path,
            alias=self.alias_host,
        )

    def signature(self, value: Any) -> object:
        """Shape, dtype and sharding, which is all that `describe` looks at; None for what it refuses."""
        if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.is_deleted():
            return None

        return value.shape, cast("object", value.dtype), value.sharding

    def buffer(self, leaf: StagedLeaf) -> Any:
        """The array itself, or a NumPy view of it, if all of it lies as it is on one CPU device."""
        value = cast("jax.Array", leaf.value)
        spec, sharding = leaf.spec, value.sharding
        if (
            not self.alias_host
            or spec.random_key_impl is not None
            or spec.dtype in PACKED
            or spec.dtype != dtype_name(value.dtype)
            or sharding.num_devices != 1
            or not on_host(sharding)
        ):
            return None

        # Half the price of going through numpy; but a buffer has a format, and these dtypes have one.
        return value if spec.dtype in _BUFFERED else np.asarray(cast("Any", value))

    def target(self, stored: StoredLeaf, like: Any, has_like: bool) -> Target | TreeDifference:
        """Decide where the array is to lie, and what of it to read: each distinct shard once.

        * A `jax.Array`: shape, dtype and sharding as it has them; uncommitted if it is. It may have
          been donated. A `jax.ShapeDtypeStruct` with a sharding: likewise, and committed.
        * The type, or a struct without a sharding: the saved sharding if its devices are all here,
          else jax's default device, uncommitted. Arrays saved from the default device alone are
          uncommitted, too, as is nearly every array that was never given a place.
        * No target: the same; but an array that was spread over devices that are not here, or whose
          64-bit type jax does not allow now, comes back as an np.ndarray.

        Nothing is ever cast. Raw uint32 data and typed keys may stand for each other if the target
        says so: the bits are the same.

        Raises:
            UnsupportedFormatError: If the stored dtype or PRNG implementation is not known here.
        """
        return array_target(stored, like if has_like else None, alias=self.alias_host)

    def parts(
        self, stored: StoredLeaf, target: Target, part_bytes: int, *, whole_chunks: bool
    ) -> Sequence[Target]:
        """Cut what is to go to devices into parts; nothing if the array keeps the regions' memory."""
        return canvas_parts(stored, target, part_bytes, whole_chunks=whole_chunks)

    def place(self, part: FilledLeaf) -> None:
        """Copy a part to its devices, and write it there into the array that grows."""
        place_part(part)

    def join(self, part: FilledLeaf) -> Any:
        """Return the array, when all parts of it are in their places."""
        return join_parts(part)

    def pack_details(self, specs: Sequence[LeafSpec], likes: Sequence[Any] | None) -> Sequence[Any]:
        """Accept what goes whole to one device, as it is; the detail is the `Placement`."""
        return pack_placements(specs, likes)

    def build_pack(self, pack: FilledPack) -> Sequence[Any]:
        """Make the arrays, each in memory of its own."""
        return make_pack(pack)

    def build(self, leaves: Sequence[FilledLeaf]) -> Sequence[Any]:
        """Make the arrays. On CPU devices they live in the regions' memory and may still be donated."""
        return make_arrays(leaves)


def _n_replicas(n_devices: int, shape: tuple[int, ...], shard_shape: tuple[int, ...]) -> int:
    """How many devices hold each shard; 1 of what has no elements."""
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
