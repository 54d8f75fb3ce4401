"""Compares a restore target with a stored leaf, and describes how they differ."""

from __future__ import annotations

__all__ = ("different", "different_array", "stored_dtype", "type_name", "type_of")

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.handlers.dtypes import numpy_dtype
from penstock.kernel.errors import TreeDifference, UnsupportedFormatError
from penstock.kernel.protocols.leaf import LeafSpec, StoredLeaf


def _on_disk(spec: LeafSpec) -> str:
    """Describe the stored leaf, as in `jax.Array float32[8,12]`, `scalar int64[]` or `string`."""
    if spec.shape is None:
        return spec.typestr
    if spec.random_key_impl is not None:
        return f"{spec.typestr} key<{spec.random_key_impl}>{_text(spec.shape[:-1])}"

    return f"{spec.typestr} {spec.dtype}{_text(spec.shape)}"


def different(kind: str, stored: StoredLeaf, in_like: str, found: str = "") -> TreeDifference:
    """Make a `TreeDifference` of `kind`; `found` defaults to a description of the stored leaf."""
    return TreeDifference(kind, stored.info.key_path, in_like, found or _on_disk(stored.spec))


def different_array(
    stored: StoredLeaf, type_name: str, shape: Sequence[int], dtype: str
) -> TreeDifference | None:
    """Compare a stored leaf with the target array, dtype first. Nothing is ever cast.

    Args:
        stored: The leaf on disk, of any kind.
        type_name: Name of the target's type, for the message.
        shape: The target's shape.
        dtype: Name of the target's dtype.

    Returns:
        The first difference, or None if there is none.
    """
    spec = stored.spec
    if spec.shape is None:
        return different("type", stored, f"{type_name} {dtype}{_text(shape)}")
    if spec.dtype != dtype:
        return different("dtype", stored, f"{dtype}{_text(shape)}")
    if spec.shape != tuple(shape):
        return different("shape", stored, f"{dtype}{_text(shape)}")

    return None


def stored_dtype(stored: StoredLeaf) -> np.dtype[Any]:
    """The numpy dtype of a stored array.

    Raises:
        UnsupportedFormatError: If this version does not know the dtype.
    """
    try:
        return numpy_dtype(stored.spec.dtype)
    except ValueError as error:
        raise UnsupportedFormatError(
            stored.info.directory or stored.info.name, str(error), key_path=stored.info.key_path
        ) from error


def type_of(value: object) -> type:
    """The restore target itself if it is a type, else its type."""
    return value if isinstance(value, type) else type(value)


def type_name(value: object) -> str:
    """The readable name of a type, or of a value's type: `int`, `numpy.float32`."""
    type_ = type_of(value)
    module = type_.__module__
    return type_.__qualname__ if module == "builtins" else f"{module}.{type_.__qualname__}"


def _text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
