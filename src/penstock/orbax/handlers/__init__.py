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

from penstock.orbax.handlers import registration as handler_registration
from penstock.orbax.handlers.array import ArrayCheckpointHandler, ArrayRestoreArgs, ArraySaveArgs
from penstock.orbax.handlers.base import AsyncCheckpointHandler, CheckpointHandler
from penstock.orbax.handlers.base_pytree import BasePyTreeCheckpointHandler
from penstock.orbax.handlers.composite import (
    CompositeArgs,
    CompositeCheckpointHandler,
    CompositeOptions,
    CompositeResults,
)
from penstock.orbax.handlers.json_handler import JsonCheckpointHandler, JsonRestoreArgs, JsonSaveArgs
from penstock.orbax.handlers.proto import ProtoCheckpointHandler, ProtoRestoreArgs, ProtoSaveArgs
from penstock.orbax.handlers.pytree import PyTreeCheckpointHandler, PyTreeRestoreArgs, PyTreeSaveArgs
from penstock.orbax.handlers.random_key import (
    JaxRandomKeyCheckpointHandler,
    JaxRandomKeyRestoreArgs,
    JaxRandomKeySaveArgs,
    NumpyRandomKeyCheckpointHandler,
    NumpyRandomKeyRestoreArgs,
    NumpyRandomKeySaveArgs,
)
from penstock.orbax.handlers.registration import (
    CheckpointHandlerRegistry,
    DefaultCheckpointHandlerRegistry,
    create_default_handler_registry,
)
from penstock.orbax.handlers.standard import (
    StandardCheckpointHandler,
    StandardRestoreArgs,
    StandardSaveArgs,
)
