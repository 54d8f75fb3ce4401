"""The module `checkpoint_utils` of Orbax's API: how leaves are restored, and waiting for steps."""

from __future__ import annotations

__all__ = (
    "PLACEHOLDER",
    "checkpoints_iterator",
    "construct_restore_args",
    "to_shape_dtype_struct",
    "wait_for_new_checkpoint",
)

from penstock.orbax.common.array_structs import to_shape_dtype_struct
from penstock.orbax.v0.leaf_handlers.type_handler_registry import PLACEHOLDER
from penstock.orbax.v0.manager.waiting_for_steps import checkpoints_iterator, wait_for_new_checkpoint
from penstock.orbax.v0.trees.restore_args import construct_restore_args
