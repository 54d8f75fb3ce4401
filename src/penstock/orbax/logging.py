"""Loggers of the saves and restores of a `CheckpointManager`."""

from __future__ import annotations

__all__ = ("AbstractLogger", "CompositeLogger", "StandardLogger", "step_statistics")

from penstock.orbax import measurements as step_statistics
from penstock.orbax.measurements import AbstractLogger, CompositeLogger, StandardLogger
