"""Options of handlers and checkpointers, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "FileOptions",
    "MemoryLimitOptions",
    "MultiprocessingOptions",
    "PyTreeMetadataOptions",
    "check_primary_host",
)

from penstock.orbax.v0.common.v0_options import (
    AsyncOptions,
    AtomicityMode,
    AtomicityOptions,
    FileOptions,
    MemoryLimitOptions,
    MultiprocessingOptions,
    PyTreeMetadataOptions,
    check_primary_host,
)
