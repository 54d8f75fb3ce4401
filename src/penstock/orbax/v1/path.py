"""Paths, paths that are still being created, and the names of steps."""

from __future__ import annotations

__all__ = (
    "Path",
    "PathAwaitingCreation",
    "PathLike",
    "step",
)

from penstock.orbax.v1 import step_formats as step
from penstock.orbax.v1.path_types import Path, PathAwaitingCreation, PathLike
