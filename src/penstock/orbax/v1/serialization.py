"""Handlers of user-defined leaf types, and their arguments."""

from __future__ import annotations

__all__ = (
    "BaseLeafHandlerRegistry",
    "DeserializationContext",
    "DeserializationParam",
    "LeafHandler",
    "LeafHandlerRegistry",
    "SerializationContext",
    "SerializationParam",
    "StandardLeafHandlerRegistry",
    "typestr",
)

from penstock.orbax.v1.common.handler_types import typestr
from penstock.orbax.v1.trees.leaf_registry import (
    BaseLeafHandlerRegistry,
    LeafHandlerRegistry,
    StandardLeafHandlerRegistry,
)
from penstock.orbax.v1.trees.leaf_serialization import (
    DeserializationContext,
    DeserializationParam,
    LeafHandler,
    SerializationContext,
    SerializationParam,
)
