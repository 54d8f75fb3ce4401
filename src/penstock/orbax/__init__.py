"""The names of Orbax's checkpoint API (v0) over penstock's pipelines: `import penstock.orbax as ocp`.

Code written for Orbax runs with its import line changed, also inside a running event loop. Importing this
module loads neither jax nor tensorstore: each name is fetched from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.orbax.version import __version__

__all__ = (
    "PLACEHOLDER",
    "AbstractCheckpointManager",
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
    "__version__",
    "abstract_checkpoint_manager",
    "aggregate_handlers",
    "apply_transformations",
    "args",
    "arrays",
    "checkpoint_args",
    "checkpoint_manager",
    "checkpoint_managers",
    "checkpoint_utils",
    "checkpointers",
    "future",
    "handlers",
    "install",
    "logging",
    "merge_trees",
    "metadata",
    "msgpack_utils",
    "multihost",
    "options",
    "path",
    "pathways",
    "serialization",
    "step",
    "test_utils",
    "transform_utils",
    "tree",
    "type_handlers",
    "utils",
    "v1",
    "version",
)

if TYPE_CHECKING:
    from penstock.orbax import (
        abstract_checkpoint_manager,
        aggregate_handlers,
        args,
        arrays,
        checkpoint_args,
        checkpoint_manager,
        checkpoint_managers,
        checkpoint_utils,
        checkpointers,
        future,
        handlers,
        logging,
        metadata,
        msgpack_utils,
        multihost,
        options,
        path,
        pathways,
        serialization,
        step,
        test_utils,
        transform_utils,
        tree,
        type_handlers,
        utils,
        v1,
        version,
    )
    from penstock.orbax.abstract_checkpoint_manager import AbstractCheckpointManager
    from penstock.orbax.checkpoint_manager import CheckpointManager
    from penstock.orbax.common.leaf_args import ArrayRestoreArgs, RestoreArgs, SaveArgs
    from penstock.orbax.future import Future
    from penstock.orbax.options import AsyncOptions
    from penstock.orbax.substitution.installation import install
    from penstock.orbax.transform_utils import merge_trees
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
    from penstock.kernel.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        {
            "penstock.orbax": (
                "abstract_checkpoint_manager",
                "aggregate_handlers",
                "args",
                "arrays",
                "checkpoint_args",
                "checkpoint_manager",
                "checkpoint_managers",
                "checkpoint_utils",
                "checkpointers",
                "future",
                "handlers",
                "logging",
                "metadata",
                "msgpack_utils",
                "multihost",
                "options",
                "path",
                "pathways",
                "serialization",
                "step",
                "test_utils",
                "transform_utils",
                "tree",
                "type_handlers",
                "utils",
                "v1",
                "version",
            ),
            "penstock.orbax.abstract_checkpoint_manager": ("AbstractCheckpointManager",),
            "penstock.orbax.checkpoint_manager": ("CheckpointManager",),
            "penstock.orbax.common.leaf_args": ("ArrayRestoreArgs", "RestoreArgs", "SaveArgs"),
            "penstock.orbax.future": ("Future",),
            "penstock.orbax.options": ("AsyncOptions",),
            "penstock.orbax.substitution.installation": ("install",),
            "penstock.orbax.transform_utils": ("merge_trees",),
            "penstock.orbax.v0.checkpointers.async_checkpointer": ("AsyncCheckpointer",),
            "penstock.orbax.v0.checkpointers.checkpointer": ("AbstractCheckpointer", "Checkpointer"),
            "penstock.orbax.v0.checkpointers.shorthands": ("PyTreeCheckpointer", "StandardCheckpointer"),
            "penstock.orbax.v0.handlers.array_checkpoint_handler": ("ArrayCheckpointHandler",),
            "penstock.orbax.v0.handlers.base_pytree_handler": ("BasePyTreeCheckpointHandler",),
            "penstock.orbax.v0.handlers.checkpoint_handler": ("AsyncCheckpointHandler", "CheckpointHandler"),
            "penstock.orbax.v0.handlers.composite_handler": (
                "CompositeCheckpointHandler",
                "CompositeOptions",
            ),
            "penstock.orbax.v0.handlers.handler_registration": (
                "CheckpointHandlerRegistry",
                "DefaultCheckpointHandlerRegistry",
            ),
            "penstock.orbax.v0.handlers.json_handler": ("JsonCheckpointHandler",),
            "penstock.orbax.v0.handlers.proto_handler": ("ProtoCheckpointHandler",),
            "penstock.orbax.v0.handlers.pytree_handler": ("PyTreeCheckpointHandler",),
            "penstock.orbax.v0.handlers.random_key_handler": (
                "JaxRandomKeyCheckpointHandler",
                "NumpyRandomKeyCheckpointHandler",
            ),
            "penstock.orbax.v0.handlers.standard_handler": ("StandardCheckpointHandler",),
            "penstock.orbax.v0.leaf_handlers.type_handler_registry": ("PLACEHOLDER",),
            "penstock.orbax.v0.manager.manager_options": ("CheckpointManagerOptions",),
            "penstock.orbax.v0.trees.transforms": ("RestoreTransform", "Transform", "apply_transformations"),
        },
    )
