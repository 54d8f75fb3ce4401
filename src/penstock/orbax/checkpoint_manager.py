"""A directory of steps, under Orbax's names."""

from __future__ import annotations

__all__ = (
    "DEFAULT_ITEM_NAME",
    "METRIC_ITEM_NAME",
    "RESERVED_ITEM_NAMES",
    "AbstractCheckpointManager",
    "AsyncCheckpointer",
    "AsyncOptions",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "FileOptions",
    "ItemMetadata",
    "MultiprocessingOptions",
    "RootMetadata",
    "StepAlreadyExistsError",
    "StepMetadata",
)

from typing import Any, Final, TypeAlias

from penstock.orbax.abstract_checkpoint_manager import AbstractCheckpointManager
from penstock.orbax.v0.checkpointers.async_checkpointer import AsyncCheckpointer
from penstock.orbax.v0.checkpointers.checkpointer import Checkpointer
from penstock.orbax.v0.common.step_metadata import CompositeItemMetadata, RootMetadata, StepMetadata
from penstock.orbax.v0.common.v0_options import AsyncOptions, FileOptions, MultiprocessingOptions
from penstock.orbax.v0.manager.checkpoint_manager import CheckpointManager, StepAlreadyExistsError
from penstock.orbax.v0.manager.manager_options import CheckpointManagerOptions

DEFAULT_ITEM_NAME: Final = "default"
METRIC_ITEM_NAME: Final = "metrics"
RESERVED_ITEM_NAMES: Final[list[str]] = []
ItemMetadata: TypeAlias = CompositeItemMetadata | Any
