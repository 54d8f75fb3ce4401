"""What `metadata` says of single leaves."""

from __future__ import annotations

__all__ = ("ArrayMetadata", "NumpyMetadata", "NumpyShapeDtype", "StorageMetadata", "leaf_metadata")

import json
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from jax.sharding import Sharding

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.leaves.sharding import decode
from penstock.kernel.messages import LeafSpec


@final
@dataclass(frozen=True)
class StorageMetadata:
    """How an array is stored.

    Attributes:
        chunk_shape: What is read and written as a whole.
        write_shape: Of a jax.Array: the part that one replica writes.
    """

    chunk_shape: tuple[int, ...] | None
    write_shape: tuple[int, ...] | None = None


@final
@dataclass(frozen=True)
class ShardingMetadata:
    """A sharding as it was recorded; its devices need not be here."""

    text: str

    def to_jax_sharding(self) -> Sharding | None:
        """Return the sharding, or None if its devices are not here."""
        return decode(self.text).sharding

    def __repr__(self) -> str:
        recorded = json.loads(self.text)
        return f"ShardingMetadata({recorded.get('device_str') or recorded.get('partition_spec')})"


@dataclass
class ArrayMetadata:
    """Of a jax.Array. Stands for it in an abstract tree."""

    shape: tuple[int, ...] | None
    dtype: Any
    sharding_metadata: Any
    storage_metadata: Any

    @property
    def sharding(self) -> Sharding | None:
        """The sharding it was saved with, if its devices are here."""
        return None if self.sharding_metadata is None else self.sharding_metadata.to_jax_sharding()


@dataclass
class NumpyShapeDtype:
    """Stands for a NumPy array in an abstract tree."""

    shape: tuple[int, ...] | None
    dtype: Any


@dataclass
class NumpyMetadata:
    """Of a NumPy array. Stands for it in an abstract tree."""

    shape: tuple[int, ...] | None
    dtype: Any
    storage_metadata: Any


_EMPTY: Final[dict[str, type[Any]]] = {"Dict": dict, "List": list, "Tuple": tuple}


def leaf_metadata(spec: LeafSpec) -> Any:
    """Say what a leaf is: arrays by their metadata, numbers and texts by an example."""
    match spec.typestr:
        case "jax.Array":
            sharding = ShardingMetadata(spec.sharding) if spec.sharding else None
            storage = StorageMetadata(spec.chunk_shape, spec.write_shape)
            return ArrayMetadata(spec.shape, numpy_dtype(spec.dtype), sharding, storage)
        case "np.ndarray":
            return NumpyMetadata(spec.shape, numpy_dtype(spec.dtype), StorageMetadata(spec.chunk_shape, None))
        case "scalar":
            return 0 if np.issubdtype(numpy_dtype(spec.dtype), np.integer) else 0.0
        case "string":
            return "string"
        case _ if spec.is_empty_marker:
            return empty_value(spec)
        case typestr:
            return typestr


def empty_value(spec: LeafSpec) -> Any:
    """Return the container with nothing in it, or None, that a marker stands for."""
    kind = _EMPTY.get(spec.typestr)
    return None if kind is None else kind()
