"""Handlers of whole objects, and the arguments that each takes."""

from __future__ import annotations

__all__ = (
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "ArraySaveArgs",
    "AsyncCheckpointHandler",
    "BasePyTreeCheckpointHandler",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "CompositeArgs",
    "CompositeCheckpointHandler",
    "CompositeOptions",
    "CompositeResults",
    "DefaultCheckpointHandlerRegistry",
    "JaxRandomKeyCheckpointHandler",
    "JaxRandomKeyRestoreArgs",
    "JaxRandomKeySaveArgs",
    "JsonCheckpointHandler",
    "JsonRestoreArgs",
    "JsonSaveArgs",
    "NumpyRandomKeyCheckpointHandler",
    "NumpyRandomKeyRestoreArgs",
    "NumpyRandomKeySaveArgs",
    "ProtoCheckpointHandler",
    "ProtoRestoreArgs",
    "ProtoSaveArgs",
    "PyTreeCheckpointHandler",
    "PyTreeRestoreArgs",
    "PyTreeSaveArgs",
    "StandardCheckpointHandler",
    "StandardRestoreArgs",
    "StandardSaveArgs",
    "create_default_handler_registry",
    "handler_registration",
)

from penstock.orbax import checkpoint_args as handler_registration
from penstock.orbax.array_checkpoint_handlers import (
    ArrayCheckpointHandler,
    ArrayRestoreArgs,
    ArraySaveArgs,
    JaxRandomKeyCheckpointHandler,
    JaxRandomKeyRestoreArgs,
    JaxRandomKeySaveArgs,
    NumpyRandomKeyCheckpointHandler,
    NumpyRandomKeyRestoreArgs,
    NumpyRandomKeySaveArgs,
)
from penstock.orbax.base_pytree_handler import BasePyTreeCheckpointHandler
from penstock.orbax.checkpoint_args import (
    AsyncCheckpointHandler,
    CheckpointHandler,
    CheckpointHandlerRegistry,
    DefaultCheckpointHandlerRegistry,
    create_default_handler_registry,
)
from penstock.orbax.composite_handler import (
    CompositeArgs,
    CompositeCheckpointHandler,
    CompositeOptions,
    CompositeResults,
)
from penstock.orbax.plain_handlers import (
    JsonCheckpointHandler,
    JsonRestoreArgs,
    JsonSaveArgs,
    ProtoCheckpointHandler,
    ProtoRestoreArgs,
    ProtoSaveArgs,
)
from penstock.orbax.pytree_handler import PyTreeCheckpointHandler, PyTreeRestoreArgs, PyTreeSaveArgs
from penstock.orbax.standard_handler import StandardCheckpointHandler, StandardRestoreArgs, StandardSaveArgs
