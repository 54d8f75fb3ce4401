"""Directories of steps: their checkpointer, and when it saves and what it keeps."""

from __future__ import annotations

__all__ = (
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "preservation_policies",
    "save_decision_policies",
)

from penstock.orbax.v1.steps import preservation_policies, save_decision_policies
from penstock.orbax.v1.steps import training_errors as errors
from penstock.orbax.v1.steps.training_checkpointer import Checkpointer
from penstock.orbax.v1.steps.training_metadata import CheckpointMetadata, RootMetadata
