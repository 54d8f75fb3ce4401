"""Encodes shardings as the JSON texts of the `_sharding` document, and decodes them for this machine."""

from __future__ import annotations

__all__ = ("UNKNOWN", "SavedSharding", "decode", "encode")

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from penstock.handlers.leaves.devices import Device, all_devices, devices_of

_Json: TypeAlias = dict[str, Any]
_OLD_CPU_NAME: Final = re.compile(r"^TFRT_CPU_(\d+)$")  # what jax before 0.10 called `cpu:0`


@final
@dataclass(frozen=True, slots=True)
class SavedSharding:
    """A stored sharding, mapped to the devices that jax has here."""

    sharding: Sharding | None  #: None if it is unknown, or if one of its devices does not exist here
    n_devices: int  #: number of devices it was spread over; 0 if unknown


UNKNOWN: Final = SavedSharding(None, 0)


@lru_cache(maxsize=1024)  # keeps no arrays alive, only meshes and devices, which live as long as the process
def encode(sharding: Sharding) -> str | None:
    """Return the JSON text of a sharding, or None for a kind that the format cannot express.

    Source:
        ORBAX_FORMAT.md §1.3. The format has no field for the memory kind, so it is not stored.
    """
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = devices_of(sharding)
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(device)})

    if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, AbstractMesh):
        return None

    axes = _spec_to_json(sharding.spec)
    if axes is None:
        return None

    mesh = sharding.mesh
    devices = cast("npt.NDArray[np.object_]", mesh.devices)
    ids = np.vectorize(_device_id, otypes=[object])(devices)
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": list(devices.shape),
            "axis_names": list(mesh.axis_names),
            "axis_types": [f"AxisType.{axis_type.name}" for axis_type in mesh.axis_types],
            "partition_spec": axes,
            "device_mesh": {"mesh": ids.tolist()},
        }
    )


@lru_cache(maxsize=1024)
def decode(text: str | None) -> SavedSharding:
    """Decode a stored sharding and find its devices. Never raises: an unreadable text is `UNKNOWN`.

    The devices are those of jax's default backend, by id for a NamedSharding and by name for a
    SingleDeviceSharding; `TFRT_CPU_0` and `cpu:0` are the same device.
    """
    if text is None:
        return UNKNOWN

    try:
        fields: _Json = json.loads(text)
        if fields["sharding_type"] == "SingleDeviceSharding":
            return _single(fields)
        if fields["sharding_type"] == "NamedSharding":
            return _named(fields)
    except Exception:  # jax may raise anything, and a restore can do without this document
        return UNKNOWN

    return UNKNOWN


def _spec_to_json(spec: PartitionSpec) -> list[str | list[str] | None] | None:
    if spec.unreduced or spec.reduced:
        return None

    axes: list[str | list[str] | None] = []
    for part in cast("Sequence[object]", tuple(spec)):
        if part is None or isinstance(part, str):
            axes.append(part)
        elif isinstance(part, tuple):
            axes.append([str(name) for name in cast("tuple[object, ...]", part)])
        else:
            return None  # PartitionSpec.UNCONSTRAINED, which no array has

    return axes


def _single(fields: _Json) -> SavedSharding:
    wanted = _device_name(fields["device_str"])
    for device in all_devices():
        if _device_name(str(device)) == wanted:
            return SavedSharding(SingleDeviceSharding(device), 1)

    return SavedSharding(None, 1)


def _named(fields: _Json) -> SavedSharding:
    shape = tuple(int(size) for size in fields["shape"])
    n_devices = math.prod(shape)
    here = {device.id: device for device in all_devices()}
    ids = _mesh_ids(fields, n_devices)
    if not here.keys() >= set(ids) or n_devices > len(here):
        return SavedSharding(None, n_devices)

    devices = np.empty(n_devices, dtype=object)
    devices[:] = [here[id_] for id_ in ids]
    # A checkpoint without axis types was written before jax had them, when every mesh was Auto.
    types = fields.get("axis_types") or ["AxisType.Auto"] * len(shape)
    mesh = Mesh(
        devices.reshape(shape),
        tuple(fields["axis_names"]),
        axis_types=tuple(AxisType[str(name).rpartition(".")[2]] for name in types),
    )
    axes: list[str | list[str] | None] = fields["partition_spec"]
    spec: PartitionSpec = cast("Any", PartitionSpec)(*[tuple(a) if isinstance(a, list) else a for a in axes])
    return SavedSharding(NamedSharding(mesh, spec), n_devices)


def _mesh_ids(fields: _Json, n_devices: int) -> list[int]:
    """Ids of the mesh's devices in C order; those of jax's first devices if none were stored."""
    mesh = fields.get("device_mesh")
    if mesh is None:
        return [device.id for device in all_devices()[:n_devices]]

    return [int(entry["id"]) for entry in np.array(mesh["mesh"], dtype=object).reshape(-1)]


def _device_id(device: Device) -> dict[str, int]:
    return {"id": device.id}


def _device_name(name: str) -> str:
    return _OLD_CPU_NAME.sub(r"cpu:\1", name)
