"""The processes of a job: which one this is, and waiting for the others."""

from __future__ import annotations

__all__ = (
    "is_pathways_backend",
    "is_primary_host",
    "process_count",
    "process_index",
    "sync_global_processes",
)

from collections.abc import Collection

from penstock import kernel
from penstock.orbax import multihost as job_processes
from penstock.orbax.multihost import is_pathways_backend, is_primary_host, process_count, process_index


async def sync_global_processes(
    key: str,
    *,
    operation_id: str,
    timeout: int | None = None,  # noqa: ASYNC109 - the name and the place are Orbax's
    processes: Collection[int] | None = None,
    record_event_name: str = "/jax/checkpoint/sync_global_devices_duration_sec",
) -> None:
    """Wait until every process of the job is here, without blocking the event loop.

    Args:
        key: Of the barrier.
        operation_id: Makes the name of the barrier unique.
        timeout: Has no effect.
        processes: The processes that take part; None for all.
        record_event_name: Has no effect: nothing is recorded.
    """
    del timeout, record_event_name
    if processes is None or len(processes) > 1:
        await kernel.Threads(1).run(job_processes.sync_global_processes, f"{key}_{operation_id}")
