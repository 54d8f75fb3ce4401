"""The processes of a job, under the names of Orbax's module `multihost`."""

from __future__ import annotations

__all__ = (
    "EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_BARRIER",
    "EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_PROCESS_ID",
    "BarrierSyncFn",
    "broadcast_one_to_all",
    "coordination_timeout",
    "distributed_to_device_ids",
    "fully_replicated_host_local_array_to_global_array",
    "get_barrier_sync_fn",
    "get_jax_distributed_client",
    "global_max",
    "initialize_distributed_to_device_ids",
    "initialize_runtime_to_distributed_ids",
    "is_cloud_pathways_persistence_enabled",
    "is_distributed_to_device_ids_initialized",
    "is_jax_distributed_client_initialized",
    "is_native_pathways_backend",
    "is_pathways_backend",
    "is_pathways_colocated_runtime_active",
    "is_pathways_controller",
    "is_primary_host",
    "is_proxy_pathways_backend",
    "is_runtime_to_distributed_ids_initialized",
    "mark_pathways_colocated_runtime_active",
    "process_count",
    "process_index",
    "process_index_from_device",
    "reached_preemption",
    "runtime_to_distributed_ids",
    "runtime_to_distributed_process_id",
    "should_skip_process_sync",
    "sync_global_processes",
    "unique_barrier_key",
    "unique_processes_from_devices",
    "use_experimental_distributed_process_id",
)

import os
from functools import partial
from importlib import import_module
from typing import Any, Final, Protocol, cast, final

import jax
import numpy as np
from jax.experimental import multihost_utils

from penstock.errors import ConfigError, SpecError

_jax: Any = jax
_multihost: Any = multihost_utils


@final
class ExperimentalFlag:
    """A flag of absl that programs of several processes set. It has no effect: processes are jax's own.

    It is defined while penstock stands in the place of Orbax, which defines it otherwise.

    Args:
        name: Of the flag.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_ours = False

    @property
    def value(self) -> bool:
        """Its present value."""
        flags = _absl_flags()
        return flags is not None and self.name in flags.FLAGS and bool(flags.FLAGS[self.name].value)

    def define(self) -> None:
        """Define it, where absl is installed, and it is not defined."""
        flags = _absl_flags()
        if flags is not None and self.name not in flags.FLAGS:
            flags.DEFINE_bool(self.name, False, "Has no effect: processes are those of jax.")
            self._is_ours = True

    def drop(self) -> None:
        """Undo that."""
        flags = _absl_flags()
        if flags is not None and self._is_ours:
            delattr(flags.FLAGS, self.name)
            self._is_ours = False


def _absl_flags() -> Any:
    try:
        return import_module("absl.flags")
    except ImportError:
        return None


EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_BARRIER: Final = ExperimentalFlag(
    "experimental_orbax_use_distributed_barrier"
)
EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_PROCESS_ID: Final = ExperimentalFlag(
    "experimental_orbax_use_distributed_process_id"
)


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


def process_index_from_device(device: Any) -> int:
    """Return the index of the process that has a device."""
    return int(device.process_index)


def unique_processes_from_devices(device_array: Any) -> set[int]:
    """Return the indices of the processes that have the devices in an array."""
    return {process_index_from_device(device) for device in device_array.flat}


def is_native_pathways_backend() -> bool:
    """Return whether one process controls all devices of the job, which penstock does not support."""
    client: Any = _jax.devices()[0].client
    return hasattr(client, "pathways") or client.runtime_type == "pathways"


def is_proxy_pathways_backend() -> bool:
    """Return whether it does so through a proxy."""
    return str(_jax.devices()[0].client.runtime_type) == "proxy/pathways"


def is_pathways_backend() -> bool:
    """Return whether either holds."""
    return is_native_pathways_backend() or is_proxy_pathways_backend()


def is_pathways_controller() -> bool:
    """Return whether this process is the one that controls all devices."""
    return str(_jax.local_devices()[0].client.runtime_type) == "pathways"


def is_cloud_pathways_persistence_enabled() -> bool:
    """Return whether the environment asks that this backend stores arrays itself.

    Raises:
        ConfigError: If `ENABLE_PATHWAYS_PERSISTENCE` is neither 0 nor 1. It is a ValueError.
    """
    asked = os.environ.get("ENABLE_PATHWAYS_PERSISTENCE", "0")
    if asked not in ("0", "1"):
        raise ConfigError("ENABLE_PATHWAYS_PERSISTENCE", f"must be 0 or 1, and is {asked!r}")

    return asked == "1"


def mark_pathways_colocated_runtime_active() -> None:
    """Refuse: penstock has no Pathways backend.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("penstock has no Pathways backend")


def is_pathways_colocated_runtime_active() -> bool:
    """Return False: penstock has no Pathways backend."""
    return False


def is_jax_distributed_client_initialized() -> bool:
    """Return whether `jax.distributed.initialize` was called in this process."""
    return bool(_jax.distributed.is_initialized())


def get_jax_distributed_client() -> Any:
    """Return the client of jax's coordination service.

    Raises:
        ValueError: If `jax.distributed.initialize` was not called.
    """
    if not is_jax_distributed_client_initialized():
        raise SpecError("jax.distributed is not initialized: call jax.distributed.initialize() first")

    return import_module("jax._src.distributed").global_state.client


def initialize_runtime_to_distributed_ids() -> None:
    """Do nothing: penstock tells processes apart by jax's own index."""


def initialize_distributed_to_device_ids() -> None:
    """Do nothing: penstock asks jax which devices a process has."""


def is_runtime_to_distributed_ids_initialized() -> bool:
    """Return True: there is nothing to initialise."""
    return True


def is_distributed_to_device_ids_initialized() -> bool:
    """Return True: there is nothing to initialise."""
    return True


def use_experimental_distributed_process_id() -> bool:
    """Return False: the index of a process is jax's own."""
    return False


def runtime_to_distributed_process_id(pid: int) -> int:
    """Return the same index: there is no other than jax's."""
    return pid


def runtime_to_distributed_ids() -> list[int]:
    """Return the indices of all processes, each at its own place."""
    return list(range(process_count()))


def distributed_to_device_ids() -> list[list[int]]:
    """Return for each process the ids of its devices."""
    ids: list[list[int]] = [[] for _ in range(process_count())]
    for device in _jax.devices():
        ids[process_index_from_device(device)].append(int(device.id))

    return ids


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """Broadcast the values of one process, by default the first, to all."""
    source = process_index() == 0 if is_source is None else is_source
    return _multihost.broadcast_one_to_all(in_tree, is_source=source)


class BarrierSyncFn(Protocol):
    """Waits at a barrier."""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all that take part are at the barrier with this key, which is used once."""
        ...


def coordination_timeout() -> int:
    """Return the seconds that a barrier waits where no other time is given."""
    return 300


def should_skip_process_sync(processes: set[int] | None = None) -> bool:
    """Return whether this process has no other to wait for. With None all take part."""
    return process_count() == 1 or processes == {process_index()}


def unique_barrier_key(key: str, *, prefix: str | None = None, suffix: str | None = None) -> str:
    """Return the key of a barrier, with what precedes it and an underscore, and what follows it and a dot."""
    before = "" if prefix is None else f"{prefix}_"
    return f"{before}{key}" if suffix is None else f"{before}{key}.{suffix}"


def get_barrier_sync_fn(*, processes: set[int] | None = None) -> BarrierSyncFn:
    """Return a function that waits until other processes of the job call theirs with the same key.

    A save of penstock calls none: one verdict ends what several processes do.

    Args:
        processes: The processes that take part, with this one; None for all.

    Raises:
        ValueError: If this process is not one of them, or `jax.distributed.initialize` was not called.
    """
    if should_skip_process_sync(processes):
        return _skip
    if processes is not None and process_index() not in processes:
        raise ConfigError("processes", f"is {sorted(processes)}, without this one, {process_index()}")

    return partial(
        _wait_at_barrier, get_jax_distributed_client(), None if processes is None else list(processes)
    )


def _skip(*, key: str, timeout_ms: int) -> None:
    """Return at once: there is no other process to wait for."""


def _wait_at_barrier(client: Any, processes: list[int] | None, *, key: str, timeout_ms: int) -> None:
    if processes is None:
        client.wait_at_barrier(key, timeout_ms)
    else:
        client.wait_at_barrier(key, timeout_ms, process_ids=processes)


def sync_global_processes(
    name: str,
    *,
    timeout: int | None = None,
    processes: set[int] | None = None,
    barrier_sync_fn: BarrierSyncFn | None = None,
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
    if should_skip_process_sync(processes):
        return
    if barrier_sync_fn is not None:
        barrier_sync_fn(key=name, timeout_ms=(timeout or coordination_timeout()) * 1000)
    else:
        _multihost.sync_global_devices(name)


def reached_preemption(step: int) -> bool:
    """Return whether the job is to end after this step."""
    try:
        return bool(_multihost.reached_preemption_sync_point(step))
    except RuntimeError:  # jax was configured not to look
        return False


def global_max(values: list[int]) -> list[int]:
    """Return for each position the greatest of the values that the processes of the job have there."""
    found: Any = _multihost.process_allgather(np.array(values, dtype=np.int32))
    return [int(value) for value in np.asarray(found).reshape(-1, len(values)).max(axis=0)]


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
