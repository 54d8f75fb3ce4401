"""How `metadata` describes single leaves."""

from __future__ import annotations

__all__ = ("ArrayMetadata", "NumpyMetadata", "NumpyShapeDtype", "empty_value", "leaf_metadata")

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jax.sharding import Sharding

from penstock.handlers.dtypes import numpy_dtype
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.orbax.common.sharding_metadata import from_serialized_string
from penstock.orbax.common.value_metadata import StorageMetadata, ZarrMetadata


@dataclass
class ArrayMetadata:
    """Describes a jax.Array; its abstract leaf."""

    shape: tuple[int, ...] | None
    dtype: Any
    sharding_metadata: Any
    storage_metadata: Any

    @property
    def sharding(self) -> Sharding | None:
        """The sharding it was saved with.

        Raises:
            ValueError: If its devices are not here.
        """
        return None if self.sharding_metadata is None else self.sharding_metadata.to_jax_sharding()


@dataclass
class NumpyShapeDtype:
    """The abstract leaf of a NumPy array."""

    shape: tuple[int, ...] | None
    dtype: Any


@dataclass
class NumpyMetadata:
    """Describes a NumPy array; its abstract leaf."""

    shape: tuple[int, ...] | None
    dtype: Any
    storage_metadata: Any


_EMPTY: Final[dict[str, type[Any]]] = {"Dict": dict, "List": list, "Tuple": tuple}


def leaf_metadata(spec: LeafSpec, document: Mapping[str, Any] | None = None) -> Any:
    """Describe a leaf: arrays by their metadata, numbers and strings by an example.

    Args:
        spec: What is stored.
        document: Of an array in zarr, its metadata there.
    """
    match spec.typestr:
        case "jax.Array":
            sharding = _sharding(spec.sharding) if spec.sharding else None
            zarr = ZarrMetadata.from_json(document)
            storage = StorageMetadata(spec.chunk_shape, spec.write_shape, zarr)
            return ArrayMetadata(spec.shape, numpy_dtype(spec.dtype), sharding, storage)
        case "np.ndarray":
            storage = StorageMetadata(spec.chunk_shape, None, ZarrMetadata.from_json(document))
            return NumpyMetadata(spec.shape, numpy_dtype(spec.dtype), storage)
        case "scalar":
            return 0 if np.issubdtype(numpy_dtype(spec.dtype), np.integer) else 0.0
        case "string":
            return "string"
        case _ if spec.is_empty_marker:
            return empty_value(spec)
        case typestr:
            return typestr


def _sharding(text: str) -> Any:
    """Read a recorded sharding; None for a kind that jax no longer has."""
    try:
        return from_serialized_string(text)
    except (ValueError, NotImplementedError, KeyError):
        return None


def empty_value(spec: LeafSpec) -> Any:
    """Return the empty container, or None, that a marker stands for."""
    kind = _EMPTY.get(spec.typestr)
    return None if kind is None else kind()
