"""The options of a `Context`."""

from __future__ import annotations

__all__ = (
    "ArrayOptions",
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "CheckpointLayout",
    "CheckpointablesOptions",
    "DeletionOptions",
    "FileOptions",
    "MemoryOptions",
    "MultiprocessingOptions",
    "PathwaysOptions",
    "PyTreeMetadataOptions",
    "PyTreeOptions",
    "SafetensorsOptions",
)

from penstock.orbax.v1.context.array_options import ArrayOptions
from penstock.orbax.v1.context.memory_options import MemoryOptions
from penstock.orbax.v1.context.v1_options import (
    AsyncOptions,
    AtomicityMode,
    AtomicityOptions,
    CheckpointablesOptions,
    CheckpointLayout,
    DeletionOptions,
    FileOptions,
    MultiprocessingOptions,
    PathwaysOptions,
    PyTreeMetadataOptions,
    PyTreeOptions,
    SafetensorsOptions,
)
