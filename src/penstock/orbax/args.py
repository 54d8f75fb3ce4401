"""Arguments of handlers: `ocp.args.PyTreeSave(tree)`, `ocp.args.Composite(state=..., config=...)`."""

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

from penstock.orbax.array_checkpoint_handlers import ArrayRestoreArgs as ArrayRestore
from penstock.orbax.array_checkpoint_handlers import ArraySaveArgs as ArraySave
from penstock.orbax.array_checkpoint_handlers import JaxRandomKeyRestoreArgs as JaxRandomKeyRestore
from penstock.orbax.array_checkpoint_handlers import JaxRandomKeySaveArgs as JaxRandomKeySave
from penstock.orbax.array_checkpoint_handlers import NumpyRandomKeyRestoreArgs as NumpyRandomKeyRestore
from penstock.orbax.array_checkpoint_handlers import NumpyRandomKeySaveArgs as NumpyRandomKeySave
from penstock.orbax.checkpoint_args import (
    CheckpointArgs,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
    register_with_handler,
)
from penstock.orbax.composite_handler import CompositeArgs as Composite
from penstock.orbax.plain_handlers import JsonRestoreArgs as JsonRestore
from penstock.orbax.plain_handlers import JsonSaveArgs as JsonSave
from penstock.orbax.plain_handlers import ProtoRestoreArgs as ProtoRestore
from penstock.orbax.plain_handlers import ProtoSaveArgs as ProtoSave
from penstock.orbax.pytree_handler import PyTreeRestoreArgs as PyTreeRestore
from penstock.orbax.pytree_handler import PyTreeSaveArgs as PyTreeSave
from penstock.orbax.standard_handler import StandardRestoreArgs as StandardRestore
from penstock.orbax.standard_handler import StandardSaveArgs as StandardSave
