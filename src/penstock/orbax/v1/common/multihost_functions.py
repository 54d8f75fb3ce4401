"""Who is who among the processes of a job."""

from __future__ import annotations

__all__ = (
    "is_pathways_backend",
    "is_primary_host",
    "process_count",
    "process_index",
    "sync_global_processes",
)

from collections.abc import Collection
from typing import Any

import jax
from anyio import to_thread
from jax.experimental import multihost_utils

_jax: Any = jax


def is_pathways_backend() -> bool:
    """Whether all devices of the job hang on one process. penstock does not support that."""
    client: Any = _jax.devices()[0].client
    return hasattr(client, "pathways") or client.runtime_type in {"pathways", "proxy/pathways"}


async def sync_global_processes(
    key: str,
    *,
    operation_id: str,
    timeout: int | None = None,  # noqa: ASYNC109 - the name and the place are Orbax's
    processes: Collection[int] | None = None,
    record_event_name: str = "/jax/checkpoint/sync_global_devices_duration_sec",
) -> None:
    """Wait until every process of the job has come here."""
    del timeout, record_event_name
    if int(_jax.process_count()) > 1 and (processes is None or len(processes) > 1):
        await to_thread.run_sync(multihost_utils.sync_global_devices, f"{key}_{operation_id}")


def is_primary_host(primary_host: int | None) -> bool:
    """Whether this process writes what is written once; with None every one does."""
    return primary_host is None or primary_host == process_index()


def process_count() -> int:
    """Return the number of processes in the job."""
    return int(_jax.process_count())


def process_index() -> int:
    """Return the number of this process."""
    return int(_jax.process_index())
