"""Paths, and paths that are still being created."""

from __future__ import annotations

__all__ = (
    "Path",
    "PathAwaitingCreation",
    "PathLike",
)

from penstock.orbax.v1.common.path_types import Path, PathAwaitingCreation, PathLike
