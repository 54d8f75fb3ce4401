"""Handlers of leaf types of the caller's, their arguments, and their registries."""

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

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax import tree_util

from penstock.embedding import flattening
from penstock.errors import HandlerError
from penstock.orbax.v1.arrays import AbstractArray, AbstractShardedArray
from penstock.orbax.v1.handler_registration import typestr
from penstock.orbax.v1.path import Path, PathAwaitingCreation
from penstock.orbax.v1.tree import PLACEHOLDER, has_attributes

_tree: Any = tree_util  # jax declares no types for it

LeafT = TypeVar("LeafT")

AbstractLeafT = TypeVar("AbstractLeafT")


@dataclass
class _Param:
    keypath: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The stored name: the keys joined by dots."""
        return ".".join([flattening.step(key)[0] for key in self.keypath])


@dataclass
class SerializationParam(_Param, Generic[LeafT]):
    """A leaf to save, and its path in the tree: jax's keys."""

    value: LeafT


@dataclass
class SerializationContext:
    """The directory that leaves are saved to, and limiters of the bytes copied and written at once."""

    parent_dir: PathAwaitingCreation
    ts_context: Any = None
    byte_limiter: Any = None
    device_host_byte_limiter: Any = None


@dataclass
class DeserializationParam(_Param, Generic[AbstractLeafT]):
    """A leaf to load: its path in the tree, and its abstract leaf, if there is one."""

    value: AbstractLeafT | type[AbstractLeafT] | None = None


@dataclass
class DeserializationContext:
    """The directory that leaves are loaded from, and their format."""

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


class AlreadyRegisteredTypeError(HandlerError, ValueError):
    """A type has a handler already."""


class UnregisteredTypeError(HandlerError, ValueError):
    """A type has no handler."""


class LeafHandlerRegistry(Protocol):
    """Handlers of leaves, each for a leaf type and its abstract type."""

    def get(self, leaf_type: type[Any]) -> type[Any]:
        """Return the handler for leaves of a type."""
        ...

    def get_abstract(self, abstract_type: type[Any]) -> type[Any]:
        """Return the handler of an abstract leaf type."""
        ...

    def get_all(self) -> Sequence[tuple[type[Any], type[Any], type[Any]]]:
        """Return every leaf type with its abstract type and its handler."""
        ...

    def add(
        self,
        leaf_type: type[Any],
        abstract_type: type[Any],
        handler_type: type[Any],
        override: bool = False,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> None:
        """Add a handler."""
        ...

    def is_handleable(self, leaf_type: type[Any]) -> bool:
        """Return whether leaves of a type have a handler."""
        ...

    def is_abstract_handleable(self, abstract_type: type[Any]) -> bool:
        """Return whether an abstract leaf type has a handler."""
        ...

    def get_secondary_typestrs(self, handler_type: type[Any]) -> Sequence[str]:
        """Return the other recorded names of a handler."""
        ...


@dataclass
class _Entry:
    leaf_type: type[Any]
    abstract_type: type[Any]
    handler_type: type[Any]
    secondary_typestrs: Sequence[str] | None


class BaseLeafHandlerRegistry:
    """An empty `LeafHandlerRegistry`. Of several handlers that fit a type, the most specific is taken."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def get(self, leaf_type: type[Any]) -> type[Any]:
        """Return the handler for leaves of a type.

        Raises:
            UnregisteredTypeError: If there is none.
        """
        found = self._find(leaf_type, _leaf_type)
        if found is None:
            raise UnregisteredTypeError(f'Unknown Leaf type: "{leaf_type!r}". Register it first.')

        return found.handler_type

    def get_abstract(self, abstract_type: type[Any]) -> type[Any]:
        """Return the handler of an abstract leaf type.

        Raises:
            UnregisteredTypeError: If there is none.
        """
        found = self._find(abstract_type, _abstract_type)
        if found is None:
            raise UnregisteredTypeError(f'Unknown AbstractLeaf type: "{abstract_type!r}". Register it first.')

        return found.handler_type

    def get_all(self) -> Sequence[tuple[type[Any], type[Any], type[Any]]]:
        return [(entry.leaf_type, entry.abstract_type, entry.handler_type) for entry in self._entries]

    def add(
        self,
        leaf_type: type[Any],
        abstract_type: type[Any],
        handler_type: type[Any],
        override: bool = False,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> None:
        """Add a handler. Adding one again does nothing.

        Raises:
            AlreadyRegisteredTypeError: If one of the types has another handler and `override` is off.
        """
        new = _Entry(leaf_type, abstract_type, handler_type, secondary_typestrs)
        for entry in self._entries:
            if (entry.leaf_type, entry.abstract_type, entry.handler_type) == (
                leaf_type,
                abstract_type,
                handler_type,
            ):
                if override:
                    entry.secondary_typestrs = secondary_typestrs

                return

        conflicts = [entry for entry in self._entries if _in_conflict(entry, new)]
        if conflicts and not override:
            raise AlreadyRegisteredTypeError(
                f"leaf_type [{leaf_type}] or abstract_type [{abstract_type}] is already handled by "
                f"{conflicts[0].handler_type}. Use override=True to replace it."
            )

        self._entries = [entry for entry in self._entries if entry not in conflicts] + [new]

    def is_handleable(self, leaf_type: type[Any]) -> bool:
        return self._find(leaf_type, _leaf_type) is not None

    def is_abstract_handleable(self, abstract_type: type[Any]) -> bool:
        return self._find(abstract_type, _abstract_type) is not None

    def get_secondary_typestrs(self, handler_type: type[Any]) -> Sequence[str]:
        found = (entry for entry in self._entries if entry.handler_type is handler_type)
        entry = next(found, None)
        return [] if entry is None else entry.secondary_typestrs or []

    def _find(self, kind: type[Any], type_of: Callable[[_Entry], type[Any]]) -> _Entry | None:
        """Return the entry with the most specific type that fits; of equals the last."""
        best: _Entry | None = None
        for entry in self._entries:
            if _is_below(kind, type_of(entry)) and (best is None or _is_below(type_of(entry), type_of(best))):
                best = entry

        return best


class ArrayLeafHandler:
    """Stands for penstock's own handler of jax.Arrays."""


class NumpyLeafHandler:
    """Stands for penstock's own handler of NumPy arrays."""


class ScalarLeafHandler:
    """Stands for penstock's own handler of numbers."""


class StringLeafHandler:
    """Stands for penstock's own handler of strings."""


BUILT_IN: Final = (ArrayLeafHandler, NumpyLeafHandler, ScalarLeafHandler, StringLeafHandler)


class StandardLeafHandlerRegistry(BaseLeafHandlerRegistry):
    """A registry with the types that penstock handles itself."""

    def __init__(self) -> None:
        super().__init__()
        self.add(jax.Array, AbstractShardedArray, ArrayLeafHandler, secondary_typestrs=["jax.Array"])
        self.add(np.ndarray, AbstractArray, NumpyLeafHandler, secondary_typestrs=["np.ndarray"])
        self.add(int, int, ScalarLeafHandler, secondary_typestrs=["scalar"])
        self.add(float, float, ScalarLeafHandler, secondary_typestrs=["scalar"])
        self.add(bytes, bytes, ScalarLeafHandler, secondary_typestrs=["scalar"])
        self.add(str, str, StringLeafHandler, secondary_typestrs=["string"])


def check_types(tree: Any, handled: Callable[[type[Any]], bool], what: str) -> None:
    """Refuse a tree with leaves of unregistered types.

    Raises:
        UnregisteredTypeError: If there is one; it names the types.
    """
    kinds = {
        leaf if isinstance(leaf, type) else type(leaf)
        for leaf in _tree.tree_leaves(tree)
        if leaf is not PLACEHOLDER
    }
    unknown = [kind for kind in kinds if not handled(kind)]
    if unknown:
        raise UnregisteredTypeError(
            f"The following {what} types are not registered in the `LeafHandlerRegistry`: {unknown}. Give "
            "the `PyTreeHandler` a registry with a handler for each."
        )


def _in_conflict(entry: _Entry, new: _Entry) -> bool:
    same_abstract = entry.abstract_type == new.abstract_type and entry.handler_type != new.handler_type
    return entry.leaf_type == new.leaf_type or same_abstract


def _leaf_type(entry: _Entry) -> type[Any]:
    return entry.leaf_type


def _abstract_type(entry: _Entry) -> type[Any]:
    return entry.abstract_type


def _is_below(kind: type[Any], other: type[Any]) -> bool:
    """Return whether a type is a subclass of another one, or has the attributes of that protocol."""
    if getattr(other, "_is_protocol", False):
        names = [name for name in other.__annotations__ if not name.startswith("_")]
        return has_attributes(kind, *names)
    try:
        return issubclass(kind, other)
    except TypeError:
        return False
