"""What handlers are told: `ocp.args.PyTreeSave(tree)`, `ocp.args.Composite(state=..., config=...)`."""

from __future__ import annotations

__all__ = (
    "ArrayRestore",
    "ArraySave",
    "CheckpointArgs",
    "Composite",
    "JaxRandomKeyRestore",
    "JaxRandomKeySave",
    "JsonRestore",
    "JsonSave",
    "NumpyRandomKeyRestore",
    "NumpyRandomKeySave",
    "ProtoRestore",
    "ProtoSave",
    "PyTreeRestore",
    "PyTreeSave",
    "StandardRestore",
    "StandardSave",
    "get_registered_args_cls",
    "get_registered_handler_cls",
    "has_registered_args",
    "register_with_handler",
)

from penstock.orbax.checkpoint_args import (
    CheckpointArgs,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
    register_with_handler,
)
from penstock.orbax.handlers.array import ArrayRestoreArgs as ArrayRestore
from penstock.orbax.handlers.array import ArraySaveArgs as ArraySave
from penstock.orbax.handlers.composite import CompositeArgs as Composite
from penstock.orbax.handlers.json_handler import JsonRestoreArgs as JsonRestore
from penstock.orbax.handlers.json_handler import JsonSaveArgs as JsonSave
from penstock.orbax.handlers.proto import ProtoRestoreArgs as ProtoRestore
from penstock.orbax.handlers.proto import ProtoSaveArgs as ProtoSave
from penstock.orbax.handlers.pytree import PyTreeRestoreArgs as PyTreeRestore
from penstock.orbax.handlers.pytree import PyTreeSaveArgs as PyTreeSave
from penstock.orbax.handlers.random_key import JaxRandomKeyRestoreArgs as JaxRandomKeyRestore
from penstock.orbax.handlers.random_key import JaxRandomKeySaveArgs as JaxRandomKeySave
from penstock.orbax.handlers.random_key import NumpyRandomKeyRestoreArgs as NumpyRandomKeyRestore
from penstock.orbax.handlers.random_key import NumpyRandomKeySaveArgs as NumpyRandomKeySave
from penstock.orbax.handlers.standard import StandardRestoreArgs as StandardRestore
from penstock.orbax.handlers.standard import StandardSaveArgs as StandardSave
