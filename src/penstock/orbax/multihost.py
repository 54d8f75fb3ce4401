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

from penstock.orbax.common.job_processes import (
    broadcast_one_to_all,
    initialize_distributed_to_device_ids,
    initialize_runtime_to_distributed_ids,
    is_pathways_backend,
    is_primary_host,
    is_runtime_to_distributed_ids_initialized,
    process_count,
    process_index,
    reached_preemption,
    sync_global_processes,
)
