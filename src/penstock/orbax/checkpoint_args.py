"""What handlers are told, under the names of Orbax's module `checkpoint_args`; see `args`, too."""

from __future__ import annotations

__all__ = (
    "CheckpointArgs",
    "CheckpointHandler",
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
from penstock.orbax.v0.handlers.checkpoint_handler import CheckpointHandler
