"""Which arrays have replicas along an axis of their mesh, and where one replica of them lies. Pure."""

from __future__ import annotations

__all__ = ("ReplicaAxis", "processes_of_mesh")

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast, final

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from penstock.kernel.errors import SpecError


@final
@dataclass(frozen=True, slots=True)
class ReplicaAxis:
    """The axis of a mesh along which replicas lie, and the one that is read."""

    name: str
    primary: int = 0  #: its place along the axis

    def one_replica(self, sharding: object) -> NamedSharding | None:
        """Return the sharding of an array over the devices of the replica that is read.

        None if an array of this sharding has no replicas along the axis: another kind of sharding, a mesh
        without the axis or with one device along it, or an array that is cut along it.

        Raises:
            SpecError: If there is no such replica.
        """
        if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, AbstractMesh):
            return None

        mesh = sharding.mesh
        if mesh.shape.get(self.name, 1) < 2 or self.name in _axes_of(sharding):
            return None
        if not 0 <= self.primary < mesh.shape[self.name]:
            n_replicas = mesh.shape[self.name]
            raise SpecError(
                f"there is no replica {self.primary} of {n_replicas} along the axis {self.name!r}"
            )

        return NamedSharding(
            _without_replicas(mesh, self.name, self.primary),
            sharding.spec,
            memory_kind=cast("Any", sharding).memory_kind,
        )


@lru_cache(maxsize=64)
def processes_of_mesh(mesh: Mesh) -> frozenset[int]:
    """Return the processes whose devices a mesh has."""
    return frozenset([device.process_index for device in cast("Any", mesh).devices.flat])


@lru_cache(maxsize=64)  # keeps no arrays alive, only meshes, which live as long as the process
def _without_replicas(mesh: Mesh, name: str, primary: int) -> Mesh:
    """Return the mesh with one place along an axis, which stays for the sake of shardings."""
    axis = mesh.axis_names.index(name)
    devices = np.take(cast("Any", mesh.devices), [primary], axis=axis)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _axes_of(sharding: NamedSharding) -> set[str]:
    """Return the names of the axes that cut an array."""
    found: set[str] = set()
    for part in cast("Sequence[str | tuple[str, ...] | None]", cast("Any", sharding).spec):
        if part is not None:
            found.update((part,) if isinstance(part, str) else part)

    return found
