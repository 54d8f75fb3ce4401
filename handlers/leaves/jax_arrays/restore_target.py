"""What a restore target asks for where a jax.Array is wanted, and whether the stored leaf satisfies it."""

from __future__ import annotations

__all__ = ("array_target",)

from dataclasses import replace
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from penstock.handlers.dtypes import dtype_name
from penstock.handlers.leaves.common.host_buffers import HostRegion
from penstock.handlers.leaves.common.mismatches import (
    different,
    different_array,
    stored_dtype,
    type_name,
    type_of,
)
from penstock.handlers.leaves.jax_arrays.devices import default_device, devices_of
from penstock.handlers.leaves.jax_arrays.placement import Placement, split
from penstock.handlers.leaves.jax_arrays.prng_keys import is_key, key_data_shape, key_dtype, known_impl
from penstock.handlers.leaves.jax_arrays.sharding import decode
from penstock.handlers.leaves.jax_arrays.shards import PACKED
from penstock.kernel.errors import TreeDifference, UnsupportedFormatError
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.reads import Target

Abstract: TypeAlias = jax.Array | jax.ShapeDtypeStruct


def array_target(stored: StoredLeaf, like: Any, *, alias: bool = True) -> Target | TreeDifference:
    """Decide how to make a jax.Array from a stored leaf.

    Args:
        stored: The leaf on disk, of any kind.
        like: An array, a struct, or their type; None if there is no target.
        alias: Whether arrays on CPU devices may keep the memory they were read into.

    Returns:
        A target whose detail is a `Placement`, or the difference between target and leaf.

    Raises:
        UnsupportedFormatError: If this process does not know the stored dtype or PRNG implementation.
    """
    if stored.spec.shape is None:
        return different("type", stored, _type_name(like))

    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        difference = _difference(stored, like)
        if difference is not None:
            return difference

        placement = _with_keys(_place(stored, like), _key_impl(stored, like))
    elif like is None or (isinstance(like, type) and issubclass(like, jax.Array | jax.ShapeDtypeStruct)):
        placement = _with_keys(_saved_place(stored, named=like is not None), _checked_impl(stored))
    else:
        return different("type", stored, _type_name(like))

    return _target(stored, placement, like, alias=alias)


def _with_keys(placement: Placement, impl: str | None) -> Placement:
    return placement if impl is None else replace(placement, key_impl=impl)


def _target(stored: StoredLeaf, placement: Placement, like: Any, *, alias: bool) -> Target | TreeDifference:
    dtype = stored_dtype(stored)
    shape = stored.spec.shape or ()
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:  # jax would narrow it
        placement = Placement(as_numpy=True) if like is None else replace(placement, wide=True)

    try:
        parts = split(placement.sharding, shape)
    except (ValueError, IndexError) as error:
        return different("shape", stored, f"{placement.sharding}, which does not fit ({error})")

    regions = tuple([HostRegion(bounds, dtype) for bounds in parts])
    kept = placement.keeps_regions and (placement.as_numpy or stored.spec.dtype not in PACKED)
    if kept and not alias and not placement.as_numpy:
        placement, kept = replace(placement, copied=True), False

    return Target(regions, 0 if kept else sum(region.nbytes for region in regions), placement)


def _difference(stored: StoredLeaf, like: Abstract) -> TreeDifference | None:
    """Compare shape and dtype; typed keys match their raw uint32 data."""
    name = _type_name(like)
    if not is_key(like.dtype):
        return different_array(stored, name, like.shape, dtype_name(like.dtype))

    spec = stored.spec
    saved, wanted = _checked_impl(stored), known_impl(like.dtype)
    fits = key_dtype(saved) == like.dtype if saved else wanted is not None and spec.dtype == "uint32"
    if not fits:
        return different("dtype", stored, f"{like.dtype}{list(like.shape)}")

    impl = saved or wanted or ""
    if spec.shape != (*like.shape, *key_data_shape(impl)):
        return different("shape", stored, f"{like.dtype}{list(like.shape)}")

    return None


def _key_impl(stored: StoredLeaf, like: Abstract) -> str | None:
    """The implementation to wrap the data with, if the target has typed keys."""
    return (stored.spec.random_key_impl or known_impl(like.dtype)) if is_key(like.dtype) else None


def _checked_impl(stored: StoredLeaf) -> str | None:
    impl = stored.spec.random_key_impl
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


def _place(stored: StoredLeaf, like: Abstract) -> Placement:
    sharding: Sharding | None = like.sharding
    if sharding is None or (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)):
        return _saved_place(stored, named=True)
    if isinstance(like, jax.Array) and not like.committed:
        return Placement()

    return Placement(sharding)


def _saved_place(stored: StoredLeaf, *, named: bool) -> Placement:
    """Choose a placement from the saved sharding, for a target that names none.

    Args:
        stored: The leaf, with its sharding's text if one was saved.
        named: Whether the caller asked for a jax.Array. If not, an np.ndarray will do, except for keys.
    """
    saved = decode(stored.spec.sharding)
    if saved.sharding is None:
        return Placement(as_numpy=saved.n_devices > 1 and not named and stored.spec.random_key_impl is None)

    if isinstance(saved.sharding, SingleDeviceSharding) and default_device() in devices_of(saved.sharding):
        return Placement()

    # A saved sharding that does not fit this array is ignored.
    return Placement(saved.sharding if _divides(saved.sharding, stored.spec.shape or ()) else None)


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
