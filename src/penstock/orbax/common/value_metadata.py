"""Descriptions of stored leaves, made without reading them."""

from __future__ import annotations

__all__ = (
    "ArrayMetadata",
    "Compression",
    "Metadata",
    "ScalarMetadata",
    "StorageMetadata",
    "StringMetadata",
    "Zarr2Metadata",
    "Zarr3Metadata",
    "ZarrMetadata",
)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax

from penstock.orbax.common.sharding_metadata import ShardingMetadata


@dataclass
class Metadata:
    """The description of a leaf. Two are equal if all but their places are.

    Attributes:
        name: The stored name of the leaf.
        directory: Where the leaf is found under that name.
    """

    name: str
    directory: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metadata)


@dataclass(frozen=True)
class Compression:
    """A codec, shown as `zstd:1`."""

    algorithm: str
    level: int | None = None

    def __repr__(self) -> str:
        return self.algorithm if self.level is None else f"{self.algorithm}:{self.level}"


@dataclass(frozen=True, kw_only=True)
class ZarrMetadata:
    """The metadata of a zarr array of either version.

    Attributes:
        zarr_format: 2 or 3.
        shape: Of the array.
        dtype: As the format spells it: `<f4` in version 2, `float32` in version 3.
        chunk_shape: Of a chunk as it is stored; in version 3, of what is called a shard there.
        compression: None if there is none.
    """

    zarr_format: int = field(default=0, init=False)
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    compression: Compression | None

    @classmethod
    def from_json(cls, meta: Mapping[str, Any] | None) -> ZarrMetadata | None:
        """Read the JSON of an array, of either version; None for an unknown version."""
        match (meta or {}).get("zarr_format"):
            case 2:
                return Zarr2Metadata.from_json(meta)
            case 3:
                return Zarr3Metadata.from_json(meta)
            case _:
                return None


@dataclass(frozen=True, kw_only=True)
class Zarr2Metadata(ZarrMetadata):
    """The content of `.zarray`.

    Attributes:
        order: Of the elements of a chunk: `C` or `F`.
        dimension_separator: In the keys of chunks: `.` or `/`.
    """

    zarr_format: int = field(default=2, init=False)
    order: str
    dimension_separator: str

    @classmethod
    def from_json(cls, meta: Mapping[str, Any] | None) -> Zarr2Metadata:
        """Read a `.zarray`."""
        meta = meta or {}
        codec: Any = meta.get("compressor")
        return cls(
            shape=tuple(meta.get("shape", ())),
            dtype=str(meta.get("dtype", "")),
            chunk_shape=tuple(meta.get("chunks", ())),
            compression=_compression(_object(codec).get("id"), codec) if codec else None,
            order=meta.get("order", "C"),
            dimension_separator=meta.get("dimension_separator", "."),
        )


@dataclass(frozen=True, kw_only=True)
class Zarr3Metadata(ZarrMetadata):
    """The content of `zarr.json`.

    Attributes:
        inner_chunk_shape: Of the chunks within a shard; None if there are no shards.
    """

    zarr_format: int = field(default=3, init=False)
    inner_chunk_shape: tuple[int, ...] | None

    @classmethod
    def from_json(cls, meta: Mapping[str, Any] | None) -> Zarr3Metadata:
        """Read a `zarr.json`; the codecs of a shard are those of its chunks."""
        meta = meta or {}
        codecs, inner = _codecs(meta.get("codecs")), None
        for codec in codecs:
            if codec.get("name") == "sharding_indexed":
                options = _object(codec.get("configuration"))
                inner = tuple(options.get("chunk_shape") or ()) or None
                codecs = _codecs(options.get("codecs"))
                break

        plain = {"bytes", "crc32c", "transpose"}
        found = [c for c in codecs if c.get("name") not in plain]
        grid = _object(_object(meta.get("chunk_grid")).get("configuration"))
        return cls(
            shape=tuple(meta.get("shape", ())),
            dtype=str(meta.get("data_type", "")),
            chunk_shape=tuple(grid.get("chunk_shape", ())),
            compression=_compression(found[0].get("name"), found[0].get("configuration")) if found else None,
            inner_chunk_shape=inner,
        )


@dataclass(frozen=True)
class StorageMetadata:
    """How an array is stored.

    Attributes:
        chunk_shape: The shape of the smallest part that can be read.
        write_shape: Of the part that one replica wrote.
        zarr_metadata: The metadata in the format; not compared.
    """

    chunk_shape: tuple[int, ...] | None
    write_shape: tuple[int, ...] | None = None
    zarr_metadata: ZarrMetadata | None = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class ArrayMetadata(Metadata):
    """The description of an array.

    Attributes:
        shape: Of the array.
        sharding: As it was saved; its devices need not be here.
        dtype: Of its elements.
        storage: How it is stored.
    """

    shape: tuple[int, ...]
    sharding: ShardingMetadata | None
    dtype: Any
    storage: StorageMetadata | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayMetadata) and _content(self) == _content(other)

    @classmethod
    def from_shape_dtype_struct(
        cls, s: jax.ShapeDtypeStruct, name: str | None = None, directory: Any = None
    ) -> ArrayMetadata:
        """Describe an array by a struct of jax."""
        return cls(
            name=cast("str", name),
            directory=directory,
            shape=s.shape,
            sharding=cast("Any", s.sharding),
            dtype=s.dtype,
        )


@dataclass(eq=False)
class ScalarMetadata(ArrayMetadata):
    """The description of a number."""

    shape: tuple[int, ...] = ()
    sharding: ShardingMetadata | None = None
    dtype: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScalarMetadata) and self.dtype == other.dtype


@dataclass(eq=False)
class StringMetadata(Metadata):
    """The description of a string."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StringMetadata)


def _content(of: ArrayMetadata) -> tuple[object, ...]:
    return of.shape, of.sharding, of.dtype, of.storage


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _codecs(value: object) -> list[dict[str, Any]]:
    found: Sequence[object] = cast("Sequence[object]", value) if isinstance(value, list) else ()
    return [cast("dict[str, Any]", codec) for codec in found if isinstance(codec, dict)]


def _compression(algorithm: object, options: object) -> Compression:
    return Compression(str(algorithm), _object(options).get("level"))
