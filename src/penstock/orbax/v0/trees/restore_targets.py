"""`RestoreArgs` as the leaves of a restore target. Pure."""

from __future__ import annotations

__all__ = ("EMPTY", "Wanted", "empty_value", "want")

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import jax
import numpy as np
from jax.experimental.layout import Format

from penstock.checkpointer.description import LeafMetadata
from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.leaves.empty import EmptyNamedTuple
from penstock.handlers.leaves.prng_keys import is_key
from penstock.orbax.common.array_structs import asked_placement, is_narrowed, jax_dtype
from penstock.orbax.common.leaf_args import ArrayRestoreArgs, RestoreArgs
from penstock.orbax.v0.leaf_handlers.stage_workers import as_stored

EMPTY: Final = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
"""What is recorded of nodes with nothing in them."""

_ARRAYS: Final = frozenset({"jax.Array", "np.ndarray", "scalar"})
"""What has a shape, unless its handler keeps it in files of its own."""

_CLASSES: Final[dict[str, type]] = {"jax.Array": jax.Array, "np.ndarray": np.ndarray, "string": str}

_NUMBERS: Final = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


@dataclass(frozen=True, slots=True)
class Wanted:
    """One leaf of a result.

    Attributes:
        like: The leaf of the restore target.
        dtype: What its elements are cast to; None for the stored dtype.
        finish: Applied to the restored value; None for nothing.
        resized: Whether the shape may differ from the stored one.
        as_stored: Whether `dtype` is the stored one, so that nothing is cast.
    """

    like: Any
    dtype: Any = None
    finish: Callable[[Any], Any] | None = None
    resized: bool = False
    as_stored: bool = False


def empty_value(typestr: str) -> Any:
    """Return the empty node that a marker stands for."""
    match typestr:
        case "Dict":
            return {}
        case "List":
            return []
        case "Tuple":
            return ()
        case "NamedTuple":
            return EmptyNamedTuple()
        case _:
            return None


def want(leaf: LeafMetadata, args: RestoreArgs, in_item: Any, *, told: bool = False) -> Wanted:
    """Decide what a stored leaf is restored as.

    Args:
        leaf: The stored leaf; not an empty marker.
        args: The request.
        in_item: The leaf of the caller's tree, whose shape and dtype apply to a jax.Array; None if
            there is none.
        told: Whether the type handler that wrote the leaf is told by `args` what to make of it.

    Raises:
        ValueError: If a different shape is requested, and `strict` is set.
    """
    if told and args.restore_type in (None, _CLASSES.get(leaf.kind)):
        return Wanted(as_stored(leaf.kind))

    found = _want(leaf, args, in_item)
    if found.dtype is None or not _is_stored_as(leaf, found.dtype):
        return found

    return replace(found, as_stored=True)


def _want(leaf: LeafMetadata, args: RestoreArgs, in_item: Any) -> Wanted:
    if leaf.shape is None and leaf.kind in _ARRAYS and leaf.random_key_impl is None:
        return Wanted(as_stored(leaf.kind))  # its handler knows where it lies, and is given all of `args`

    kind = args.restore_type
    if kind is None:
        kind = leaf.kind
    if kind == "jax.Array" or (isinstance(kind, type) and issubclass(kind, jax.Array)):
        return _want_array(leaf, args, in_item)
    if leaf.shape is None:
        return Wanted(as_stored(kind) if isinstance(kind, str) else kind)
    if kind == "np.ndarray" or kind is np.ndarray:
        return Wanted(np.ndarray, args.dtype)
    if kind == "scalar" or (isinstance(kind, type) and issubclass(kind, int | float | complex | np.number)):
        dtype = np.dtype(leaf.dtype if args.dtype is None else args.dtype)
        finish = cast("Callable[[Any], Any]", kind) if isinstance(kind, type) else None
        return Wanted(_NUMBERS.get(dtype.kind, float), args.dtype, finish)

    return Wanted(as_stored(kind) if isinstance(kind, str) else kind)


def _is_stored_as(leaf: LeafMetadata, dtype: Any) -> bool:
    try:
        return bool(leaf.dtype) and numpy_dtype(leaf.dtype) == np.dtype(dtype)
    except TypeError:  # not a dtype: the cast reports it
        return False


def _want_array(leaf: LeafMetadata, args: RestoreArgs, in_item: Any) -> Wanted:
    shape, dtype, strict, place = None, args.dtype, True, None
    if isinstance(args, ArrayRestoreArgs):
        shape, strict, place = args.global_shape, args.strict, asked_placement(args)
        if strict and _is_array(in_item):
            shape = in_item.shape if shape is None else shape
            dtype = in_item.dtype if dtype is None else dtype
    if leaf.shape is None or leaf.random_key_impl is not None:
        return _want_keys(leaf, place)

    if is_narrowed(leaf.dtype if dtype is None else dtype):
        dtype = jax_dtype(leaf.dtype if dtype is None else dtype)

    wanted_shape = leaf.shape if shape is None else tuple(shape)
    if strict and wanted_shape != leaf.shape:
        raise ValueError(
            f"{leaf.key_path}: Requested shape: {wanted_shape} is not compatible with the stored shape: "
            f"{leaf.shape}. With strict=False the array is padded with zeros or truncated."
        )

    resized = wanted_shape != leaf.shape
    if place is None and not resized:
        return Wanted(jax.Array, dtype)

    fmt, sharding = (place, place.sharding) if isinstance(place, Format) else (None, place)
    make: Any = jax.ShapeDtypeStruct
    like = make(wanted_shape, np.dtype(leaf.dtype if dtype is None else dtype), sharding=sharding)
    return Wanted(like, dtype, None if fmt is None else lambda value: _put(value, fmt), resized)


def _want_keys(leaf: LeafMetadata, place: Any) -> Wanted:
    """Whether a leaf is a typed PRNG key, whose shape and dtype only its own handler knows."""
    if place is None or leaf.shape is None:
        return Wanted(jax.Array)

    return Wanted(jax.Array, None, lambda value: _put(value, place))


def _is_array(value: Any) -> bool:
    """Whether a value has a numeric dtype and a shape with at least one axis."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(value, type) or not shape or dtype is None:
        return False

    return not is_key(dtype)


def _put(value: Any, place: Any) -> Any:
    return cast("Any", jax).device_put(value, place)
