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

from penstock.orbax.v0.common.checkpoint_args import (
    CheckpointArgs,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
    register_with_handler,
)
from penstock.orbax.v0.handlers.array_checkpoint_handler import ArrayRestoreArgs as ArrayRestore
from penstock.orbax.v0.handlers.array_checkpoint_handler import ArraySaveArgs as ArraySave
from penstock.orbax.v0.handlers.composite_handler import CompositeArgs as Composite
from penstock.orbax.v0.handlers.json_handler import JsonRestoreArgs as JsonRestore
from penstock.orbax.v0.handlers.json_handler import JsonSaveArgs as JsonSave
from penstock.orbax.v0.handlers.proto_handler import ProtoRestoreArgs as ProtoRestore
from penstock.orbax.v0.handlers.proto_handler import ProtoSaveArgs as ProtoSave
from penstock.orbax.v0.handlers.pytree_handler import PyTreeRestoreArgs as PyTreeRestore
from penstock.orbax.v0.handlers.pytree_handler import PyTreeSaveArgs as PyTreeSave
from penstock.orbax.v0.handlers.random_key_handler import JaxRandomKeyRestoreArgs as JaxRandomKeyRestore
from penstock.orbax.v0.handlers.random_key_handler import JaxRandomKeySaveArgs as JaxRandomKeySave
from penstock.orbax.v0.handlers.random_key_handler import NumpyRandomKeyRestoreArgs as NumpyRandomKeyRestore
from penstock.orbax.v0.handlers.random_key_handler import NumpyRandomKeySaveArgs as NumpyRandomKeySave
from penstock.orbax.v0.handlers.standard_handler import StandardRestoreArgs as StandardRestore
from penstock.orbax.v0.handlers.standard_handler import StandardSaveArgs as StandardSave
