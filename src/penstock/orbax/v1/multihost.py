"""Who is who among the processes of a job."""

from __future__ import annotations

__all__ = (
    "is_pathways_backend",
    "is_primary_host",
    "process_count",
    "process_index",
    "sync_global_processes",
)

from penstock.orbax.v1.common.multihost_functions import (
    is_pathways_backend,
    is_primary_host,
    process_count,
    process_index,
    sync_global_processes,
)
