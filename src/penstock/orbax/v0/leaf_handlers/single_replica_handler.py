"""The type handler of jax.Arrays whose replicas are read once."""

from __future__ import annotations

__all__ = ("InvalidShardingError", "SingleReplicaArrayHandler", "single_replica_keywords")

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
import numpy.typing as npt

from penstock.handlers.coordinators.jax_processes import processes_of_jax
from penstock.handlers.leaves.devices import all_devices
from penstock.handlers.leaves.single_replica import ReplicaAxis
from penstock.orbax.common.leaf_args import (
    ParamInfo,
    RestoreArgs,
    SingleReplicaArrayRestoreArgs,
    check_input_arguments,
)
from penstock.orbax.v0.leaf_handlers.array_handler import ArrayHandler


class InvalidShardingError(ValueError):
    """A sharding without replicas."""


class SingleReplicaArrayHandler(ArrayHandler):
    """Reads each distinct shard once, and puts it on the devices of every replica.

    In a job of several processes, a checkpointer whose registry has it restores with `replica_axis`: one
    replica is read, and sent to the others. In one process `ArrayHandler` reads each shard once, too; this
    one requires that there are replicas.

    Args:
        replica_axis_index: The axis of the mesh along which replicas lie.
        primary_replica_id: Which replica is read.
        broadcast_memory_limit_bytes: Has no effect: the checkpointer's `restore_concurrent_bytes` is the
            limit, of which a round takes a quarter.
        broadcast_memory_scaling_factor: Has no effect.
        **kwargs: The options of `ArrayHandler`.
    """

    def __init__(
        self,
        replica_axis_index: int | None = 0,
        primary_replica_id: int | None = 0,
        broadcast_memory_limit_bytes: int | None = None,
        broadcast_memory_scaling_factor: float | None = 0.75,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.replica_axis_index = replica_axis_index
        self.primary_replica_id = primary_replica_id
        self.broadcast_memory_limit_bytes = broadcast_memory_limit_bytes
        self.broadcast_memory_scaling_factor = broadcast_memory_scaling_factor

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Read arrays.

        Args:
            infos: Of the leaves.
            args: `SingleReplicaArrayRestoreArgs`, each with its sharding.

        Raises:
            InvalidShardingError: If a sharding is not a NamedSharding, or its mesh has one replica.
            ValueError: If there are no such `args`, or as `ArrayHandler` raises it.
        """
        if args is None:
            raise ValueError(
                "a single replica is read with SingleReplicaArrayRestoreArgs, and there are none"
            )

        check_input_arguments(infos, args)
        for arg in args:
            if not isinstance(arg, SingleReplicaArrayRestoreArgs):
                problem = f"a single replica is read with SingleReplicaArrayRestoreArgs, not {type(arg)}"
                raise ValueError(problem)  # the kind that Orbax raises
            if arg.sharding is None:
                raise ValueError("a single replica is read with a sharding, and there is none")

            self._check(arg.sharding)

        return await super().deserialize(infos, args)

    def keywords(self, like: Any) -> Mapping[str, Any]:
        """Return the keywords of `Checkpointer.restore` that restore a target so; none without replicas."""
        index, primary = self.replica_axis_index or 0, self.primary_replica_id or 0
        for leaf in jax.tree.leaves(like):
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(sharding, jax.sharding.NamedSharding):
                continue

            names = cast("Sequence[str]", sharding.mesh.axis_names)
            if index < len(names) and ReplicaAxis(names[index], primary).one_replica(sharding) is not None:
                return {"replica_axis": names[index], "primary_replica": primary}

        return {}

    def _check(self, sharding: Any) -> None:
        if not isinstance(sharding, jax.sharding.NamedSharding):
            raise InvalidShardingError(
                f"replicas lie along an axis of a mesh: {sharding} is not a NamedSharding"
            )

        devices = cast("npt.NDArray[np.object_]", sharding.mesh.devices)
        one = np.take(devices, self.primary_replica_id or 0, axis=self.replica_axis_index or 0)
        if np.size(one) == len(all_devices()):
            raise InvalidShardingError("all devices are in one replica: there is no other to read it for")


def single_replica_keywords(registry: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a restore is told besides, if the type handler of jax.Arrays reads one replica.

    Args:
        registry: Of type handlers.
        keywords: Of the restore. One that casts or resizes arrays is of each process alone.
    """
    if processes_of_jax()[1] == 1 or "like" not in keywords or {"dtype", "strict"} & keywords.keys():
        return {}

    handler = registry.get(jax.Array) if registry.has(jax.Array) else None
    return handler.keywords(keywords["like"]) if isinstance(handler, SingleReplicaArrayHandler) else {}
