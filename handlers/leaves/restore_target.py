"""Restore targets for jax.Arrays: the check that a stored leaf fits one, and the memory its values go to.

`array_target` checks that the stored leaf satisfies it. `split` makes a host region for each shard that this
process needs, and `make_arrays` the jax.Array once they are filled.
"""

from __future__ import annotations

__all__ = ("ArrayPlacement", "Bounds", "array_target", "bounds_of", "make_arrays", "split")

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, cast, final

import jax
import numpy.typing as npt
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from penstock.handlers.leaves.blocks import HostRegion
from penstock.handlers.leaves.devices import Slices, default_device, device_indices, devices_of, on_host
from penstock.handlers.leaves.prng_keys import is_key, key_data_shape, key_dtype, known_impl
from penstock.handlers.leaves.sharding import decode
from penstock.handlers.leaves.shards import PACKED, shard_grid
from penstock.handlers.leaves.stored_value import different, different_array, stored_dtype, type_name, type_of
from penstock.kernel.errors import TreeDifference, UnsupportedFormatError
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.leaf_handlers import ReadLeaf
from penstock.kernel.protocols.reads import Target

Abstract: TypeAlias = jax.Array | jax.ShapeDtypeStruct


def array_target(stored: StoredLeaf, like: Any, *, alias: bool = True) -> Target | TreeDifference:
    """Decide how to make a jax.Array from a stored leaf, and so from all with its spec and such a `like`.

    Args:
        stored: The leaf on disk, of any kind.
        like: An array, a struct, or their type; None if there is no target.
        alias: Whether arrays on CPU devices may keep the memory they were read into.

    Returns:
        A target whose detail is an `ArrayPlacement`, or the difference between target and leaf.

    Raises:
        UnsupportedFormatError: If this process does not know the stored dtype or PRNG implementation.
    """
    if stored.spec.shape is None:
        return different("type", stored, _type_name(like))

    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        difference = _difference(stored, like)
        if difference is not None:
            return difference

        placement = _place(stored, like)
        if is_key(like.dtype):  # wrap the data with the saved implementation, or with the target's
            placement = replace(placement, key_impl=stored.spec.extended_dtype or known_impl(like.dtype))
    elif like is None or (isinstance(like, type) and issubclass(like, jax.Array | jax.ShapeDtypeStruct)):
        placement = replace(_saved_place(stored, named=like is not None), key_impl=_checked_impl(stored))
    else:
        return different("type", stored, _type_name(like))

    return _target(stored, placement, like, alias=alias)


def _target(
    stored: StoredLeaf, placement: ArrayPlacement, like: Any, *, alias: bool
) -> Target | TreeDifference:
    dtype = stored_dtype(stored)
    shape = stored.spec.shape or ()
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:  # jax would narrow it
        placement = ArrayPlacement(as_numpy=True) if like is None else replace(placement, wide=True)

    try:
        parts = split(placement.sharding, shape)
    except (ValueError, IndexError) as error:
        shown = getattr(placement.sharding, "spec", placement.sharding)
        return different("sharding", stored, f"{shown} cannot divide an array of shape {shape}: {error}")

    regions = tuple([HostRegion(bounds, dtype) for bounds in parts])
    is_packed = stored.spec.dtype in PACKED
    plain = not (is_packed or placement.as_numpy or placement.wide or placement.key_impl)
    alone = placement.sharding is None or isinstance(placement.sharding, SingleDeviceSharding)
    even = alone or shard_grid(cast("Sharding", placement.sharding), shape) is not None
    kept = placement.keeps_regions and (placement.as_numpy or not is_packed)
    if kept and not alias and not placement.as_numpy:
        placement, kept = replace(placement, copied=True), False

    staging = 0 if kept else sum([region.nbytes for region in regions])
    return Target(regions, staging, _one_for_equals(placement), packable=plain and even)


@lru_cache(maxsize=1024)  # keeps no arrays alive, only meshes and devices, which live as long as the process
def _one_for_equals(placement: ArrayPlacement) -> ArrayPlacement:
    """Return the same object for equal placements: small arrays that have one are made in one step."""
    return placement


def _difference(stored: StoredLeaf, like: Abstract) -> TreeDifference | None:
    """Compare shape and dtype; typed keys match their raw uint32 data."""
    spec = stored.spec
    if not is_key(like.dtype):
        return different_array(stored, like, _type_name)

    saved, wanted = _checked_impl(stored), known_impl(like.dtype)
    fits = key_dtype(saved) == like.dtype if saved else wanted is not None and spec.dtype == "uint32"
    if not fits:
        return different("dtype", stored, f"{like.dtype}{list(like.shape)}")

    impl = saved or wanted or ""
    if spec.shape != (*like.shape, *key_data_shape(impl)):
        return different("shape", stored, f"{like.dtype}{list(like.shape)}")

    return None


def _checked_impl(stored: StoredLeaf) -> str | None:
    impl = stored.spec.extended_dtype
    if impl is not None:
        try:
            key_dtype(impl)
        except ValueError as error:
            raise UnsupportedFormatError(
                stored.info.directory or stored.info.name,
                f"the PRNG implementation {impl!r} is not registered with jax here",
                key_path=stored.info.key_path,
            ) from error

    return impl


def _place(stored: StoredLeaf, like: Abstract) -> ArrayPlacement:
    sharding: Sharding | None = like.sharding
    if sharding is None or (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)):
        return _saved_place(stored, named=True)
    if isinstance(like, jax.Array) and not like.committed:
        return ArrayPlacement()

    return ArrayPlacement(sharding)


def _saved_place(stored: StoredLeaf, *, named: bool) -> ArrayPlacement:
    """Choose a placement from the saved sharding, for a target that names none.

    Args:
        stored: The leaf, with its sharding's text if one was saved.
        named: Whether the caller asked for a jax.Array. If not, an np.ndarray will do, except for keys.
    """
    saved = decode(stored.spec.sharding)
    if saved.sharding is None:
        return ArrayPlacement(
            as_numpy=saved.n_devices > 1 and not named and stored.spec.extended_dtype is None
        )

    if isinstance(saved.sharding, SingleDeviceSharding) and default_device() in devices_of(saved.sharding):
        return ArrayPlacement()

    # A saved sharding that does not fit this array is ignored.
    return ArrayPlacement(saved.sharding if _divides(saved.sharding, stored.spec.shape or ()) else None)


def _divides(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    try:
        split(sharding, shape)
    except (ValueError, IndexError):
        return False

    return True


def _type_name(like: Any) -> str:
    if like is None or isinstance(like, jax.Array):
        return "jax.Array"  # and not the class that implements it

    return "jax.ShapeDtypeStruct" if type_of(like) is jax.ShapeDtypeStruct else type_name(like)


Bounds: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, slots=True)
class ArrayPlacement:
    """The way from its regions to the value of one leaf: the array handler's `Target.detail`."""

    sharding: Sharding | None = None  #: of the data or key data; None for jax's default device, uncommitted
    as_numpy: bool = False  #: make an np.ndarray, because jax here cannot hold the array as it was saved
    key_impl: str | None = None  #: wrap the data as typed PRNG keys of this implementation
    wide: bool = False  #: a 64-bit type is wanted while jax_enable_x64 is off
    copied: bool = False  #: copy the regions, although a CPU device could use them in place

    @property
    def keeps_regions(self) -> bool:
        """True if the value keeps using the regions' memory."""
        if self.as_numpy:
            return True

        return default_device().platform == "cpu" if self.sharding is None else on_host(self.sharding)


@lru_cache(maxsize=4096)
def split(sharding: Sharding | None, shape: tuple[int, ...]) -> tuple[Bounds, ...]:
    """Return the distinct parts of an array of `shape` that the devices of this process will hold.

    Raises:
        ValueError: If the sharding does not divide the shape.
        IndexError: If the sharding has more axes than the shape.
    """
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return (tuple([(0, size) for size in shape]),)

    return tuple({bounds_of(index, shape): None for index in device_indices(sharding, shape).values()})


def make_arrays(leaves: Sequence[ReadLeaf]) -> list[object]:
    """Make the value of every leaf, all single-device arrays in one call. Blocking.

    Arrays on CPU devices keep using the regions' memory. For other devices the bytes are copied, and this
    returns only when the copies are done, so that the regions can be freed.
    """
    plans = [cast("ArrayPlacement", leaf.target.detail) for leaf in leaves]
    # Whether jax narrows 64-bit types is a thread-local setting; a target that names one gets it.
    with jax.enable_x64(True) if any(plan.wide for plan in plans) else nullcontext():
        loose, placed = _put(leaves, plans)
        values = [_value(leaf, plan, loose, placed) for leaf, plan in zip(leaves, plans, strict=True)]

    if any(leaf.target.staging_bytes for leaf in leaves):
        cast("Any", jax).block_until_ready(values)

    return values


def _put(
    leaves: Sequence[ReadLeaf], plans: Sequence[ArrayPlacement]
) -> tuple[Iterator[jax.Array], Iterator[jax.Array]]:
    """Transfer the leaves for the default device, and those for one given device, each in order."""
    loose: list[npt.NDArray[Any]] = []
    placed: list[npt.NDArray[Any]] = []
    places: list[Sharding] = []
    for leaf, plan in zip(leaves, plans, strict=True):
        if plan.as_numpy:
            continue
        if plan.sharding is None:
            loose.append(_host(leaf, plan))
        elif isinstance(plan.sharding, SingleDeviceSharding):
            placed.append(_host(leaf, plan))
            places.append(plan.sharding)

    put = cast("Any", jax).device_put
    return iter(put(loose)), iter(put(placed, places))


def _value(
    leaf: ReadLeaf, plan: ArrayPlacement, loose: Iterator[jax.Array], placed: Iterator[jax.Array]
) -> object:
    if plan.as_numpy:
        return _host(leaf, plan)

    value: jax.Array
    if plan.sharding is None:
        value = next(loose)
    elif isinstance(plan.sharding, SingleDeviceSharding):
        value = next(placed)
    else:
        value = _sharded(leaf, plan, plan.sharding)

    if plan.key_impl is not None:
        return cast("object", jax.random.wrap_key_data(value, impl=plan.key_impl))

    return value


def _sharded(leaf: ReadLeaf, plan: ArrayPlacement, sharding: Sharding) -> jax.Array:
    """Make an array on several devices; its shards alias their regions where possible."""
    shape = leaf.stored.spec.shape or ()
    if not leaf.target.regions:  # it is on devices of other processes alone
        make: Callable[..., jax.Array] = jax.make_array_from_single_device_arrays
        return make(shape, sharding, [], dtype=stored_dtype(leaf.stored))

    parts = {region.bounds: cast("HostRegion", region).array() for region in leaf.target.regions}

    def part(index: Slices | None) -> npt.NDArray[Any]:
        return _copied_if(plan, parts[bounds_of(index or (), shape)])

    # Costs a fifth of transferring each shard as its own array and joining them.
    array: jax.Array = cast("Any", jax).make_array_from_callback(shape, sharding, part)
    return array


def bounds_of(index: Slices, shape: tuple[int, ...]) -> Bounds:
    """The (start, stop) along each axis of the region that the slices select."""
    return tuple([part.indices(size)[:2] for part, size in zip(index, shape, strict=True)])


def _host(leaf: ReadLeaf, plan: ArrayPlacement) -> npt.NDArray[Any]:
    return _copied_if(plan, cast("HostRegion", leaf.target.regions[0]).array())


def _copied_if(plan: ArrayPlacement, host: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return host.copy() if plan.copied else host
