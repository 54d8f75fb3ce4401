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

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from penstock.orbax.v1.common.handler_types import typestr
from penstock.orbax.v1.common.path_types import Path, PathAwaitingCreation
from penstock.orbax.v1.trees.leaf_registry import (
    BaseLeafHandlerRegistry,
    LeafHandlerRegistry,
    StandardLeafHandlerRegistry,
)
from penstock.stages.pytree.flattening import step

LeafT = TypeVar("LeafT")
AbstractLeafT = TypeVar("AbstractLeafT")


def _name(keypath: tuple[Any, ...]) -> str:
    return ".".join([step(key)[0] for key in keypath])


@dataclass
class SerializationParam(Generic[LeafT]):
    """A leaf to save, and its path in the tree: jax's keys."""

    keypath: tuple[Any, ...]
    value: LeafT

    @property
    def name(self) -> str:
        """The stored name: the keys joined by dots."""
        return _name(self.keypath)


@dataclass
class SerializationContext:
    """Where leaves are saved, and the limiters of the bytes copied and written at once."""

    parent_dir: PathAwaitingCreation
    ts_context: Any = None
    byte_limiter: Any = None
    device_host_byte_limiter: Any = None


@dataclass
class DeserializationParam(Generic[AbstractLeafT]):
    """A leaf to load: its path in the tree, and its abstract leaf, if there is one."""

    keypath: tuple[Any, ...]
    value: AbstractLeafT | type[AbstractLeafT] | None = None

    @property
    def name(self) -> str:
        """The stored name: the keys joined by dots."""
        return _name(self.keypath)


@dataclass
class DeserializationContext:
    """Where leaves are loaded from."""

    parent_dir: Path
    ocdbt_checkpoint: bool
    zarr3_checkpoint: bool
    ts_context: Any = None
    byte_limiter: Any = None


@runtime_checkable
class LeafHandler(Protocol[LeafT, AbstractLeafT]):
    """Saves and loads leaves of one type in its own files. Constructed with the argument `context`."""

    async def serialize(
        self, params: Sequence[SerializationParam[LeafT]], serialization_context: SerializationContext
    ) -> Awaitable[None]:
        """Copy the values, which may change once this returns; return an awaitable that writes them."""
        ...

    async def deserialize(
        self,
        params: Sequence[DeserializationParam[AbstractLeafT]],
        deserialization_context: DeserializationContext,
    ) -> Awaitable[Sequence[LeafT]]:
        """Begin to load; return an awaitable of the values, in order."""
        ...

    async def metadata(
        self,
        params: Sequence[DeserializationParam[None]],
        deserialization_context: DeserializationContext,
    ) -> Sequence[AbstractLeafT]:
        """Describe what was saved, in a form that `deserialize` takes."""
        ...
