"""Orbax's newer checkpoint API on penstock: `import penstock.orbax.v1 as ocp`.

The same names, signatures and files as `orbax.checkpoint.experimental.v1` of Orbax 0.12.8. What differs is
listed in docs/howto/move-from-orbax-v1.md.
"""

from __future__ import annotations

__all__ = (
    "PLACEHOLDER",
    "AbstractCheckpointable",
    "AsyncResponse",
    "CheckpointMetadata",
    "Checkpointable",
    "CheckpointableHandler",
    "Context",
    "PyTreeMetadata",
    "StatefulCheckpointable",
    "arrays",
    "checkpointables_metadata",
    "delete",
    "delete_async",
    "errors",
    "handlers",
    "is_orbax_checkpoint",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "multihost",
    "options",
    "partial",
    "path",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "serialization",
    "training",
    "tree",
)

from penstock.orbax.v1 import (
    arrays,
    errors,
    handlers,
    multihost,
    options,
    partial,
    path,
    serialization,
    training,
    tree,
)
from penstock.orbax.v1.handler_registration import (
    AbstractCheckpointable,
    Checkpointable,
    CheckpointableHandler,
    StatefulCheckpointable,
)
from penstock.orbax.v1.loading import (
    PyTreeMetadata,
    checkpointables_metadata,
    delete,
    delete_async,
    is_orbax_checkpoint,
    load,
    load_async,
    load_checkpointables,
    load_checkpointables_async,
    load_pytree,
    load_pytree_async,
    metadata,
    pytree_metadata,
)
from penstock.orbax.v1.operation import AsyncResponse
from penstock.orbax.v1.options import Context
from penstock.orbax.v1.saving import (
    save,
    save_async,
    save_checkpointables,
    save_checkpointables_async,
    save_pytree,
    save_pytree_async,
)
from penstock.orbax.v1.step_formats import CheckpointMetadata
from penstock.orbax.v1.tree import PLACEHOLDER
