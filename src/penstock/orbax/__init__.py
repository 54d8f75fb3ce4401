"""The names of Orbax's checkpoint API (v0) over penstock's pipelines: `import penstock.orbax as ocp`.

Code written for Orbax runs with its import line changed, also inside a running event loop. Importing this
module loads neither jax nor tensorstore: each name is fetched from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = (
    "PLACEHOLDER",
    "AbstractCheckpointer",
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointHandler",
    "AsyncCheckpointer",
    "AsyncOptions",
    "BasePyTreeCheckpointHandler",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "CompositeCheckpointHandler",
    "CompositeOptions",
    "DefaultCheckpointHandlerRegistry",
    "Future",
    "JaxRandomKeyCheckpointHandler",
    "JsonCheckpointHandler",
    "NumpyRandomKeyCheckpointHandler",
    "ProtoCheckpointHandler",
    "PyTreeCheckpointHandler",
    "PyTreeCheckpointer",
    "RestoreArgs",
    "RestoreTransform",
    "SaveArgs",
    "StandardCheckpointHandler",
    "StandardCheckpointer",
    "Transform",
    "apply_transformations",
    "args",
    "checkpoint_manager",
    "checkpoint_managers",
    "checkpoint_utils",
    "checkpointers",
    "future",
    "handlers",
    "merge_trees",
    "metadata",
    "options",
    "path",
    "step",
    "test_utils",
    "transform_utils",
    "tree",
    "type_handlers",
    "utils",
    "v1",
)

if TYPE_CHECKING:
    from penstock.orbax import (
        args,
        checkpoint_manager,
        checkpoint_managers,
        checkpoint_utils,
        checkpointers,
        future,
        handlers,
        metadata,
        options,
        path,
        step,
        test_utils,
        transform_utils,
        tree,
        type_handlers,
        utils,
        v1,
    )
    from penstock.orbax.checkpoint_manager import CheckpointManager
    from penstock.orbax.common.leaf_args import ArrayRestoreArgs, RestoreArgs, SaveArgs
    from penstock.orbax.future import Future
    from penstock.orbax.options import AsyncOptions
    from penstock.orbax.tree import merge_trees
    from penstock.orbax.v0.checkpointers.async_checkpointer import AsyncCheckpointer
    from penstock.orbax.v0.checkpointers.checkpointer import AbstractCheckpointer, Checkpointer
    from penstock.orbax.v0.checkpointers.shorthands import PyTreeCheckpointer, StandardCheckpointer
    from penstock.orbax.v0.handlers.array_checkpoint_handler import ArrayCheckpointHandler
    from penstock.orbax.v0.handlers.base_pytree_handler import BasePyTreeCheckpointHandler
    from penstock.orbax.v0.handlers.checkpoint_handler import AsyncCheckpointHandler, CheckpointHandler
    from penstock.orbax.v0.handlers.composite_handler import CompositeCheckpointHandler, CompositeOptions
    from penstock.orbax.v0.handlers.handler_registration import (
        CheckpointHandlerRegistry,
        DefaultCheckpointHandlerRegistry,
    )
    from penstock.orbax.v0.handlers.json_handler import JsonCheckpointHandler
    from penstock.orbax.v0.handlers.proto_handler import ProtoCheckpointHandler
    from penstock.orbax.v0.handlers.pytree_handler import PyTreeCheckpointHandler
    from penstock.orbax.v0.handlers.random_key_handler import (
        JaxRandomKeyCheckpointHandler,
        NumpyRandomKeyCheckpointHandler,
    )
    from penstock.orbax.v0.handlers.standard_handler import StandardCheckpointHandler
    from penstock.orbax.v0.leaf_handlers.type_handler_registry import PLACEHOLDER
    from penstock.orbax.v0.manager.manager_options import CheckpointManagerOptions
    from penstock.orbax.v0.trees.transforms import RestoreTransform, Transform, apply_transformations
else:
    # In the `else`, because a checker that saw `__getattr__` would accept `penstock.orbax.typo`.
    from importlib import import_module as _import_module

    _MODULE_OF = {
        "AbstractCheckpointer": "penstock.orbax.v0.checkpointers.checkpointer",
        "ArrayCheckpointHandler": "penstock.orbax.v0.handlers.array_checkpoint_handler",
        "ArrayRestoreArgs": "penstock.orbax.common.leaf_args",
        "AsyncCheckpointHandler": "penstock.orbax.v0.handlers.checkpoint_handler",
        "AsyncCheckpointer": "penstock.orbax.v0.checkpointers.async_checkpointer",
        "AsyncOptions": "penstock.orbax.options",
        "BasePyTreeCheckpointHandler": "penstock.orbax.v0.handlers.base_pytree_handler",
        "CheckpointHandler": "penstock.orbax.v0.handlers.checkpoint_handler",
        "CheckpointHandlerRegistry": "penstock.orbax.v0.handlers.handler_registration",
        "CheckpointManager": "penstock.orbax.checkpoint_manager",
        "CheckpointManagerOptions": "penstock.orbax.v0.manager.manager_options",
        "Checkpointer": "penstock.orbax.v0.checkpointers.checkpointer",
        "CompositeCheckpointHandler": "penstock.orbax.v0.handlers.composite_handler",
        "CompositeOptions": "penstock.orbax.v0.handlers.composite_handler",
        "DefaultCheckpointHandlerRegistry": "penstock.orbax.v0.handlers.handler_registration",
        "Future": "penstock.orbax.future",
        "JaxRandomKeyCheckpointHandler": "penstock.orbax.v0.handlers.random_key_handler",
        "JsonCheckpointHandler": "penstock.orbax.v0.handlers.json_handler",
        "NumpyRandomKeyCheckpointHandler": "penstock.orbax.v0.handlers.random_key_handler",
        "PLACEHOLDER": "penstock.orbax.v0.leaf_handlers.type_handler_registry",
        "ProtoCheckpointHandler": "penstock.orbax.v0.handlers.proto_handler",
        "PyTreeCheckpointHandler": "penstock.orbax.v0.handlers.pytree_handler",
        "PyTreeCheckpointer": "penstock.orbax.v0.checkpointers.shorthands",
        "RestoreArgs": "penstock.orbax.common.leaf_args",
        "RestoreTransform": "penstock.orbax.v0.trees.transforms",
        "SaveArgs": "penstock.orbax.common.leaf_args",
        "StandardCheckpointHandler": "penstock.orbax.v0.handlers.standard_handler",
        "StandardCheckpointer": "penstock.orbax.v0.checkpointers.shorthands",
        "Transform": "penstock.orbax.v0.trees.transforms",
        "apply_transformations": "penstock.orbax.v0.trees.transforms",
        "merge_trees": "penstock.orbax.tree",
        "args": "penstock.orbax.args",
        "checkpoint_manager": "penstock.orbax.checkpoint_manager",
        "checkpoint_managers": "penstock.orbax.checkpoint_managers",
        "checkpointers": "penstock.orbax.checkpointers",
        "future": "penstock.orbax.future",
        "handlers": "penstock.orbax.handlers",
        "metadata": "penstock.orbax.metadata",
        "options": "penstock.orbax.options",
        "path": "penstock.orbax.path",
        "step": "penstock.orbax.step",
        "tree": "penstock.orbax.tree",
        "utils": "penstock.orbax.utils",
        "v1": "penstock.orbax.v1",
        "type_handlers": "penstock.orbax.type_handlers",
        "transform_utils": "penstock.orbax.transform_utils",
        "test_utils": "penstock.orbax.test_utils",
        "checkpoint_utils": "penstock.orbax.checkpoint_utils",
    }

    def __getattr__(name: str) -> object:
        try:
            home = _MODULE_OF[name]
        except KeyError:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=_import_module(__name__)) from None
        module = _import_module(home)
        value = module if home == f"{__name__}.{name}" else getattr(module, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_OF})
