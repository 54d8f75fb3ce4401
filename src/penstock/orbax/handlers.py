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

from penstock.orbax.v0.handlers import handler_registration
from penstock.orbax.v0.handlers.array_checkpoint_handler import (
    ArrayCheckpointHandler,
    ArrayRestoreArgs,
    ArraySaveArgs,
)
from penstock.orbax.v0.handlers.base_pytree_handler import BasePyTreeCheckpointHandler
from penstock.orbax.v0.handlers.checkpoint_handler import AsyncCheckpointHandler, CheckpointHandler
from penstock.orbax.v0.handlers.composite_handler import (
    CompositeArgs,
    CompositeCheckpointHandler,
    CompositeOptions,
    CompositeResults,
)
from penstock.orbax.v0.handlers.handler_registration import (
    CheckpointHandlerRegistry,
    DefaultCheckpointHandlerRegistry,
    create_default_handler_registry,
)
from penstock.orbax.v0.handlers.json_handler import JsonCheckpointHandler, JsonRestoreArgs, JsonSaveArgs
from penstock.orbax.v0.handlers.proto_handler import ProtoCheckpointHandler, ProtoRestoreArgs, ProtoSaveArgs
from penstock.orbax.v0.handlers.pytree_handler import (
    PyTreeCheckpointHandler,
    PyTreeRestoreArgs,
    PyTreeSaveArgs,
)
from penstock.orbax.v0.handlers.random_key_handler import (
    JaxRandomKeyCheckpointHandler,
    JaxRandomKeyRestoreArgs,
    JaxRandomKeySaveArgs,
    NumpyRandomKeyCheckpointHandler,
    NumpyRandomKeyRestoreArgs,
    NumpyRandomKeySaveArgs,
)
from penstock.orbax.v0.handlers.standard_handler import (
    StandardCheckpointHandler,
    StandardRestoreArgs,
    StandardSaveArgs,
)
