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
    from penstock.orbax.checkpointers import (
        AbstractCheckpointer,
        AsyncCheckpointer,
        Checkpointer,
        PyTreeCheckpointer,
        StandardCheckpointer,
    )
    from penstock.orbax.future import Future
    from penstock.orbax.handlers import (
        ArrayCheckpointHandler,
        AsyncCheckpointHandler,
        BasePyTreeCheckpointHandler,
        CheckpointHandler,
        CheckpointHandlerRegistry,
        CompositeCheckpointHandler,
        CompositeOptions,
        DefaultCheckpointHandlerRegistry,
        JaxRandomKeyCheckpointHandler,
        JsonCheckpointHandler,
        NumpyRandomKeyCheckpointHandler,
        ProtoCheckpointHandler,
        PyTreeCheckpointHandler,
        StandardCheckpointHandler,
    )
    from penstock.orbax.handlers.restoring import PLACEHOLDER
    from penstock.orbax.leaf_args import ArrayRestoreArgs, RestoreArgs, SaveArgs
    from penstock.orbax.manager_options import CheckpointManagerOptions
    from penstock.orbax.options import AsyncOptions
    from penstock.orbax.transforms import RestoreTransform, Transform, apply_transformations
    from penstock.orbax.tree import merge_trees
else:
    # In the `else`, because a checker that saw `__getattr__` would accept `penstock.orbax.typo`.
    from importlib import import_module as _import_module

    _MODULE_OF = {
        "AbstractCheckpointer": "penstock.orbax.checkpointers",
        "ArrayCheckpointHandler": "penstock.orbax.handlers",
        "ArrayRestoreArgs": "penstock.orbax.leaf_args",
        "AsyncCheckpointHandler": "penstock.orbax.handlers",
        "AsyncCheckpointer": "penstock.orbax.checkpointers",
        "AsyncOptions": "penstock.orbax.options",
        "BasePyTreeCheckpointHandler": "penstock.orbax.handlers",
        "CheckpointHandler": "penstock.orbax.handlers",
        "CheckpointHandlerRegistry": "penstock.orbax.handlers",
        "CheckpointManager": "penstock.orbax.checkpoint_manager",
        "CheckpointManagerOptions": "penstock.orbax.manager_options",
        "Checkpointer": "penstock.orbax.checkpointers",
        "CompositeCheckpointHandler": "penstock.orbax.handlers",
        "CompositeOptions": "penstock.orbax.handlers",
        "DefaultCheckpointHandlerRegistry": "penstock.orbax.handlers",
        "Future": "penstock.orbax.future",
        "JaxRandomKeyCheckpointHandler": "penstock.orbax.handlers",
        "JsonCheckpointHandler": "penstock.orbax.handlers",
        "NumpyRandomKeyCheckpointHandler": "penstock.orbax.handlers",
        "PLACEHOLDER": "penstock.orbax.handlers.restoring",
        "ProtoCheckpointHandler": "penstock.orbax.handlers",
        "PyTreeCheckpointHandler": "penstock.orbax.handlers",
        "PyTreeCheckpointer": "penstock.orbax.checkpointers",
        "RestoreArgs": "penstock.orbax.leaf_args",
        "RestoreTransform": "penstock.orbax.transforms",
        "SaveArgs": "penstock.orbax.leaf_args",
        "StandardCheckpointHandler": "penstock.orbax.handlers",
        "StandardCheckpointer": "penstock.orbax.checkpointers",
        "Transform": "penstock.orbax.transforms",
        "apply_transformations": "penstock.orbax.transforms",
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
