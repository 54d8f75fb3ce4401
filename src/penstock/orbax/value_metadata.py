"""Descriptions of stored leaves and of their shardings, made without reading arrays or having the devices."""

from __future__ import annotations

__all__ = (
    "ArrayMetadata",
    "Compression",
    "DeviceMetadata",
    "DeviceMetadataMesh",
    "Metadata",
    "NamedShardingMetadata",
    "ScalarMetadata",
    "ShardingMetadata",
    "SingleDeviceShardingMetadata",
    "StorageMetadata",
    "StringMetadata",
    "Zarr2Metadata",
    "Zarr3Metadata",
    "ZarrMetadata",
    "from_jax_sharding",
    "from_serialized_string",
    "to_sharding",
)

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from penstock import kernel

_jax: Any = jax
_sharding: Any = SingleDeviceSharding


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
    """The way that an array is stored.

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


@dataclass
class DeviceMetadata:
    """A device, by its number."""

    id: int

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DeviceMetadata:
        """Make one from a result of `asdict`."""
        return cls(id=data["id"])

    @classmethod
    def from_jax_device(cls, device: Any) -> DeviceMetadata:
        """Make one from a device of this process."""
        return cls(id=device.id)


@dataclass
class DeviceMetadataMesh:
    """The devices of a mesh, in nested lists of the mesh's rank."""

    mesh: Sequence[Any]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DeviceMetadataMesh:
        """Make one from a result of `asdict`."""
        return cls(mesh=_mapped(DeviceMetadata.from_dict, data["mesh"]))

    @classmethod
    def from_jax_mesh(cls, mesh: Mesh) -> DeviceMetadataMesh:
        """Make one from a mesh of devices."""
        devices = cast("npt.NDArray[np.object_]", mesh.devices)
        return cls(mesh=_mapped(DeviceMetadata.from_jax_device, devices.tolist()))

    def to_jax_device_mesh(self) -> Any:
        """Return the devices, nested in the same way.

        Raises:
            ValueError: If one is not here.
        """
        here = {device.id: device for device in _jax.devices()}

        def find(device: DeviceMetadata) -> Any:
            if device.id not in here:
                raise ValueError(
                    f"the array was saved from device {device.id}, and here are {sorted(here)}: "
                    f"restore it with another sharding"
                )

            return here[device.id]

        return _mapped(find, self.mesh)


@dataclass
class ShardingMetadata(ABC):
    """A sharding that a checkpoint can record, without its devices."""

    @classmethod
    @abstractmethod
    def from_jax_sharding(cls, jax_sharding: Any) -> ShardingMetadata:
        """Make one from a sharding of jax."""

    @abstractmethod
    def to_jax_sharding(self) -> Sharding:
        """Return the sharding of jax, over devices that are here.

        Raises:
            ValueError: If one of them is not here.
        """

    @classmethod
    @abstractmethod
    def from_deserialized_dict(cls, deserialized_dict: dict[str, Any]) -> ShardingMetadata:
        """Read one from recorded JSON values.

        Raises:
            ValueError: If something is missing.
        """

    @abstractmethod
    def to_serialized_string(self) -> str:
        """Return the recorded JSON text."""


@dataclass(eq=False)
class NamedShardingMetadata(ShardingMetadata):
    """A `jax.sharding.NamedSharding`.

    Attributes:
        shape: Of the mesh.
        axis_names: Of the mesh.
        partition_spec: For each axis of the array None, the name of a mesh axis, or several.
        axis_types: Of the mesh; None for automatic ones.
        device_mesh: Its devices; None for those that jax lists first.
    """

    shape: npt.NDArray[Any]
    axis_names: list[str]
    partition_spec: tuple[str | tuple[str, ...] | None, ...]
    axis_types: tuple[AxisType, ...] | None = None
    device_mesh: DeviceMetadataMesh | None = None

    @classmethod
    def from_jax_sharding(cls, jax_sharding: Any) -> NamedShardingMetadata:
        mesh = jax_sharding.mesh
        return cls(
            shape=np.array(list(mesh.shape.values())),
            axis_names=list(mesh.axis_names),
            axis_types=tuple(mesh.axis_types),
            partition_spec=tuple(jax_sharding.spec),
            device_mesh=DeviceMetadataMesh.from_jax_mesh(mesh),
        )

    def to_jax_sharding(self) -> NamedSharding:
        shape = tuple(int(size) for size in self.shape)
        nested = self.device_mesh.to_jax_device_mesh() if self.device_mesh else _jax.devices()
        found: list[Any] = _jax.tree.leaves(nested)
        devices = np.empty(len(found), dtype=object)
        devices[:] = found
        mesh = Mesh(devices.reshape(shape), tuple(self.axis_names), axis_types=self.axis_types)
        return NamedSharding(mesh, cast("Any", PartitionSpec)(*_parts(self)))

    @classmethod
    def from_deserialized_dict(cls, deserialized_dict: dict[str, Any]) -> NamedShardingMetadata:
        missing = {"shape", "axis_names", "partition_spec"} - deserialized_dict.keys()
        if missing:
            raise ValueError(f"the recorded sharding has no {sorted(missing)}: {deserialized_dict}")

        types = deserialized_dict.get("axis_types")
        mesh = deserialized_dict.get("device_mesh")
        return cls(
            shape=np.array(deserialized_dict["shape"]),
            axis_names=list(deserialized_dict["axis_names"]),
            partition_spec=tuple(deserialized_dict["partition_spec"]),
            axis_types=tuple([AxisType[name.rpartition(".")[2]] for name in types]) if types else None,
            device_mesh=DeviceMetadataMesh.from_dict(mesh) if mesh else None,
        )

    def to_serialized_string(self) -> str:
        fields: dict[str, Any] = {
            "sharding_type": "NamedSharding",
            "shape": self.shape.tolist(),
            "axis_names": self.axis_names,
        }
        if self.axis_types is not None:
            fields["axis_types"] = [f"AxisType.{type_.name}" for type_ in self.axis_types]

        fields["partition_spec"] = self.partition_spec
        if self.device_mesh is not None:
            fields["device_mesh"] = asdict(self.device_mesh)

        return json.dumps(fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedShardingMetadata):
            return False

        return np.array_equal(self.shape, other.shape) and _comparable(self) == _comparable(other)


@dataclass(eq=False)
class SingleDeviceShardingMetadata(ShardingMetadata):
    """A `jax.sharding.SingleDeviceSharding`.

    Attributes:
        device_str: jax's name of the device; `TFRT_CPU_0` of older versions is `cpu:0` now.
    """

    device_str: str

    @classmethod
    def from_jax_sharding(cls, jax_sharding: Any) -> SingleDeviceShardingMetadata:
        return cls(device_str=str(next(iter(jax_sharding.device_set))))

    def to_jax_sharding(self) -> SingleDeviceSharding:
        wanted = _device_name(self.device_str)
        local: Sequence[Any] = _jax.local_devices()
        for device in local:
            if _device_name(str(device)) == wanted:
                return cast("SingleDeviceSharding", _sharding(device))

        raise ValueError(f"the device {wanted} is not among jax.local_devices()")

    @classmethod
    def from_deserialized_dict(cls, deserialized_dict: dict[str, Any]) -> SingleDeviceShardingMetadata:
        if deserialized_dict.get("device_str") is None:
            raise ValueError(f"the recorded sharding has no device_str: {deserialized_dict}")

        return cls(device_str=deserialized_dict["device_str"])

    def to_serialized_string(self) -> str:
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": self.device_str})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SingleDeviceShardingMetadata):
            return False

        return _device_name(self.device_str) == _device_name(other.device_str)


def from_jax_sharding(jax_sharding: Any) -> ShardingMetadata | None:
    """Convert a sharding of jax. A kind that cannot be recorded gives None and is logged."""
    if isinstance(jax_sharding, NamedSharding):
        return NamedShardingMetadata.from_jax_sharding(jax_sharding)
    if isinstance(jax_sharding, SingleDeviceSharding):
        return SingleDeviceShardingMetadata.from_jax_sharding(jax_sharding)

    kernel.get_logger().warning("orbax.sharding_not_recorded", kind=type(jax_sharding).__name__)
    return None


def from_serialized_string(serialized_str: str) -> ShardingMetadata:
    """Read a recorded sharding.

    Raises:
        ValueError: If something is missing, or jax no longer has its kind.
        NotImplementedError: If its kind is unknown.
    """
    fields = json.loads(serialized_str)
    match fields["sharding_type"]:
        case "NamedSharding":
            return NamedShardingMetadata.from_deserialized_dict(fields)
        case "SingleDeviceSharding":
            return SingleDeviceShardingMetadata.from_deserialized_dict(fields)
        case "PositionalSharding":
            raise ValueError("jax no longer has PositionalSharding: restore with a NamedSharding")
        case kind:
            raise NotImplementedError(f"a sharding of the kind {kind} cannot be read")


def to_sharding(sharding: Any) -> Any:
    """Return the sharding of jax for a `ShardingMetadata`; anything else as it is."""
    return sharding.to_jax_sharding() if isinstance(sharding, ShardingMetadata) else sharding


def _mapped(function: Any, nested: Any) -> Any:
    if isinstance(nested, list | tuple):
        return [_mapped(function, inner) for inner in cast("Any", nested)]

    return function(nested)


def _comparable(of: NamedShardingMetadata) -> tuple[object, ...]:
    return of.axis_names, of.axis_types, _parts(of), of.device_mesh


def _parts(of: NamedShardingMetadata) -> tuple[object, ...]:
    """Several axes are a list in JSON."""
    parts: tuple[object, ...] = of.partition_spec
    return tuple([tuple(cast("list[str]", part)) if isinstance(part, list) else part for part in parts])


def _device_name(name: str) -> str:
    return name.replace("TFRT_CPU_", "cpu:")
