"""Loggers that a `CheckpointManager` tells of its saves and restores."""

from __future__ import annotations

__all__ = ("AbstractLogger", "CompositeLogger", "StandardLogger", "step_statistics")

from penstock.orbax.v0.common import step_statistics
from penstock.orbax.v0.common.step_statistics import AbstractLogger, CompositeLogger, StandardLogger
