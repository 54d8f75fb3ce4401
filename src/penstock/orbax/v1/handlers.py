"""Handlers of checkpointables, and their registries."""

from __future__ import annotations

__all__ = (
    "AbstractCheckpointable",
    "Checkpointable",
    "CheckpointableHandler",
    "CheckpointableHandlerRegistry",
    "JsonHandler",
    "ProtoHandler",
    "PyTreeHandler",
    "StatefulCheckpointable",
    "global_registry",
    "local_registry",
    "register_handler",
)

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from penstock.orbax.v1.handler_registration import (
    METRICS,
    STATE,
    AbstractCheckpointable,
    AlreadyExistsError,
    Checkpointable,
    CheckpointableHandler,
    CheckpointableHandlerRegistry,
    StatefulCheckpointable,
    global_registry,
    local_registry,
    register_handler,
)
from penstock.orbax.v1.plain_handlers import (
    JsonHandler,
    MetricsHandler,
    ProtoHandler,
    StatefulCheckpointableHandler,
)
from penstock.orbax.v1.pytree_handler import PyTreeHandler

_OLDER: Final = ("orbax.checkpoint._src.handlers.", "orbax.checkpoint.v0._src.handlers.")


def _older(*names: str) -> list[str]:
    return [prefix + name for name in names for prefix in _OLDER]


def _register(handler: type[Any], name: str | None = None, recorded: Sequence[str] | None = None) -> None:
    with suppress(AlreadyExistsError):  # this module may be loaded anew
        register_handler(handler, checkpointable_name=name, secondary_typestrs=recorded)


# The order counts: of those that can handle an object the last one does.
_register(ProtoHandler, recorded=_older("proto_checkpoint_handler.ProtoCheckpointHandler"))
_register(JsonHandler, recorded=_older("json_checkpoint_handler.JsonCheckpointHandler"))
_register(StatefulCheckpointableHandler)
_register(MetricsHandler, METRICS)
_register(
    PyTreeHandler,
    recorded=_older(
        "pytree_checkpoint_handler.PyTreeCheckpointHandler",
        "standard_checkpoint_handler.StandardCheckpointHandler",
    ),
)
_register(PyTreeHandler, STATE)
