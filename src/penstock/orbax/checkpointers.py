"""What saves and restores atomically."""

from __future__ import annotations

__all__ = (
    "AbstractCheckpointer",
    "AsyncCheckpointer",
    "Checkpointer",
    "PyTreeCheckpointer",
    "StandardCheckpointer",
)

from penstock.orbax.v0.checkpointers.async_checkpointer import AsyncCheckpointer
from penstock.orbax.v0.checkpointers.checkpointer import AbstractCheckpointer, Checkpointer
from penstock.orbax.v0.checkpointers.shorthands import PyTreeCheckpointer, StandardCheckpointer
