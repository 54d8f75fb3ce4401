"""What saves and restores atomically."""

from __future__ import annotations

__all__ = (
    "AbstractCheckpointer",
    "AsyncCheckpointer",
    "Checkpointer",
    "PyTreeCheckpointer",
    "StandardCheckpointer",
)

from penstock.orbax.async_checkpointer import AsyncCheckpointer
from penstock.orbax.checkpointer import AbstractCheckpointer, Checkpointer
from penstock.orbax.shorthands import PyTreeCheckpointer, StandardCheckpointer
