"""A directory of steps, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "CheckpointManager",
    "CheckpointManagerOptions",
    "RootMetadata",
    "StepAlreadyExistsError",
    "StepMetadata",
)

from penstock.orbax.v0.common.step_metadata import RootMetadata, StepMetadata
from penstock.orbax.v0.manager.checkpoint_manager import CheckpointManager, StepAlreadyExistsError
from penstock.orbax.v0.manager.manager_options import CheckpointManagerOptions
