"""Paths, paths that are still being created, and the names of steps."""

from __future__ import annotations

__all__ = (
    "Path",
    "PathAwaitingCreation",
    "PathLike",
    "step",
)

from penstock.orbax.v1.common.path_types import Path, PathAwaitingCreation, PathLike
from penstock.orbax.v1.steps import step_formats as step
