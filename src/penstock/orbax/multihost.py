"""The processes of a job, under the names of Orbax's module `multihost`."""

from __future__ import annotations

__all__ = (
    "broadcast_one_to_all",
    "initialize_distributed_to_device_ids",
    "initialize_runtime_to_distributed_ids",
    "is_pathways_backend",
    "is_primary_host",
    "is_runtime_to_distributed_ids_initialized",
    "process_count",
    "process_index",
    "reached_preemption",
    "sync_global_processes",
)

from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

_jax: Any = jax
_multihost: Any = multihost_utils


def process_count() -> int:
    """Return the number of processes in the job."""
    return int(_jax.process_count())


def process_index() -> int:
    """Return the index of this process."""
    return int(_jax.process_index())


def is_primary_host(primary_host: int | None) -> bool:
    """Return whether this is the process that writes what is written once. With None every process is."""
    return primary_host is None or primary_host == process_index()


def has_primary_host(primary_host: int | None) -> bool:
    """Return whether some process of the job is the one that writes what is written once."""
    return primary_host in (None, 0) or 0 < primary_host < process_count()


def is_pathways_backend() -> bool:
    """Return whether one process controls all devices of the job, which penstock does not support."""
    client: Any = _jax.devices()[0].client
    return hasattr(client, "pathways") or client.runtime_type in {"pathways", "proxy/pathways"}


def initialize_runtime_to_distributed_ids() -> None:
    """Do nothing: penstock tells processes apart by jax's own index."""


def initialize_distributed_to_device_ids() -> None:
    """Do nothing: penstock asks jax which devices a process has."""


def is_runtime_to_distributed_ids_initialized() -> bool:
    """Return True: there is nothing to initialise."""
    return True


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """Broadcast the values of one process, by default the first, to all."""
    source = process_index() == 0 if is_source is None else is_source
    return _multihost.broadcast_one_to_all(in_tree, is_source=source)


def sync_global_processes(
    name: str,
    *,
    timeout: int | None = None,
    processes: set[int] | None = None,
    barrier_sync_fn: Callable[..., Any] | None = None,
    record_event_name: str = "/jax/checkpoint/sync_global_devices_duration_sec",
) -> None:
    """Wait until every process of the job is here. A single process does not wait.

    Args:
        name: Of the barrier; used once.
        timeout: Seconds, passed on to `barrier_sync_fn`.
        processes: The processes that take part; None for all.
        barrier_sync_fn: Waits in place of jax.
        record_event_name: Has no effect: nothing is recorded.
    """
    if process_count() == 1 or (processes is not None and processes == {process_index()}):
        return
    if barrier_sync_fn is not None:
        barrier_sync_fn(key=name, timeout_ms=(timeout or 300) * 1000)
    else:
        _multihost.sync_global_devices(name)


def reached_preemption(step: int) -> bool:
    """Return whether the job is to end after this step."""
    try:
        return bool(_multihost.reached_preemption_sync_point(step))
    except RuntimeError:  # jax was configured not to look
        return False


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> jax.Array:
    """Turn an array that every process has on its own devices into one that is replicated over all devices.

    Args:
        arr: As `pmap` returns it, perhaps with a leading axis that has one index per device.
    """
    parts = sorted(cast("Any", arr).addressable_shards, key=lambda shard: next(iter(shard.data.devices())).id)
    shards = [shard.data for shard in parts]
    if shards[0].shape != arr.shape:
        shards = [shard[0] for shard in shards]

    shape = shards[0].shape
    mesh = jax.sharding.Mesh(np.array(_jax.devices()), axis_names=("x",))
    sharding = jax.sharding.NamedSharding(mesh, _jax.sharding.PartitionSpec())
    made: jax.Array = _jax.make_array_from_single_device_arrays(shape, sharding, shards)
    return made
