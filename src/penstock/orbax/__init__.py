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
    from penstock.orbax.array_checkpoint_handlers import (
        ArrayCheckpointHandler,
        JaxRandomKeyCheckpointHandler,
        NumpyRandomKeyCheckpointHandler,
    )
    from penstock.orbax.base_pytree_handler import BasePyTreeCheckpointHandler
    from penstock.orbax.checkpoint_args import (
        AsyncCheckpointHandler,
        CheckpointHandler,
        CheckpointHandlerRegistry,
        DefaultCheckpointHandlerRegistry,
    )
    from penstock.orbax.checkpoint_manager import CheckpointManager
    from penstock.orbax.checkpointers import (
        AbstractCheckpointer,
        AsyncCheckpointer,
        Checkpointer,
        PyTreeCheckpointer,
        StandardCheckpointer,
    )
    from penstock.orbax.composite_handler import CompositeCheckpointHandler, CompositeOptions
    from penstock.orbax.future import Future
    from penstock.orbax.installation import install
    from penstock.orbax.leaf_args import ArrayRestoreArgs, RestoreArgs, SaveArgs
    from penstock.orbax.manager_steps import CheckpointManagerOptions
    from penstock.orbax.options import AsyncOptions
    from penstock.orbax.plain_handlers import JsonCheckpointHandler, ProtoCheckpointHandler
    from penstock.orbax.pytree_handler import PyTreeCheckpointHandler
    from penstock.orbax.standard_handler import StandardCheckpointHandler
    from penstock.orbax.transform_utils import RestoreTransform, Transform, apply_transformations, merge_trees
    from penstock.orbax.type_handlers import PLACEHOLDER
else:
    from penstock.embedding import lazy_names as _lazy_names

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
            "penstock.orbax.array_checkpoint_handlers": (
                "ArrayCheckpointHandler",
                "JaxRandomKeyCheckpointHandler",
                "NumpyRandomKeyCheckpointHandler",
            ),
            "penstock.orbax.base_pytree_handler": ("BasePyTreeCheckpointHandler",),
            "penstock.orbax.checkpoint_args": (
                "AsyncCheckpointHandler",
                "CheckpointHandler",
                "CheckpointHandlerRegistry",
                "DefaultCheckpointHandlerRegistry",
            ),
            "penstock.orbax.checkpoint_manager": ("CheckpointManager",),
            "penstock.orbax.checkpointers": (
                "AbstractCheckpointer",
                "AsyncCheckpointer",
                "Checkpointer",
                "PyTreeCheckpointer",
                "StandardCheckpointer",
            ),
            "penstock.orbax.composite_handler": (
                "CompositeCheckpointHandler",
                "CompositeOptions",
            ),
            "penstock.orbax.future": ("Future",),
            "penstock.orbax.installation": ("install",),
            "penstock.orbax.leaf_args": (
                "ArrayRestoreArgs",
                "RestoreArgs",
                "SaveArgs",
            ),
            "penstock.orbax.manager_steps": ("CheckpointManagerOptions",),
            "penstock.orbax.options": ("AsyncOptions",),
            "penstock.orbax.plain_handlers": (
                "JsonCheckpointHandler",
                "ProtoCheckpointHandler",
            ),
            "penstock.orbax.pytree_handler": ("PyTreeCheckpointHandler",),
            "penstock.orbax.standard_handler": ("StandardCheckpointHandler",),
            "penstock.orbax.transform_utils": (
                "RestoreTransform",
                "Transform",
                "apply_transformations",
                "merge_trees",
            ),
            "penstock.orbax.type_handlers": ("PLACEHOLDER",),
        },
    )
