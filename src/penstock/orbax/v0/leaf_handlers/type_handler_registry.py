"""Which type handler a leaf goes to: the first one registered that fits its type."""

from __future__ import annotations

__all__ = (
    "PLACEHOLDER",
    "PlaceholderHandler",
    "TypeHandlerRegistry",
    "create_type_handler_registry",
    "default_entries",
    "stage_registry",
    "standard_registry",
)

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, Final, Protocol, final, runtime_checkable

import jax
import numpy as np

from penstock.kernel.protocols.leaf_handlers import HandlerLookup, Waitable
from penstock.orbax.common.array_metadata_store import Store
from penstock.orbax.common.leaf_args import ParamInfo, RestoreArgs, SaveArgs
from penstock.orbax.v0.leaf_handlers.array_handler import ArrayHandler
from penstock.orbax.v0.leaf_handlers.numpy_handlers import NumpyHandler, ScalarHandler
from penstock.orbax.v0.leaf_handlers.stage_workers import StageRegistry, StageWorkers
from penstock.orbax.v0.leaf_handlers.string_handler import StringHandler
from penstock.orbax.v0.leaf_handlers.type_handler import TypeHandler

PLACEHOLDER: Final = ...
"""Stands in a target for a leaf that is not to be read."""


@runtime_checkable
class TypeHandlerRegistry(Protocol):
    """Type handlers by leaf type, and by the type name that is recorded."""

    def add(
        self,
        ty: Any,
        handler: TypeHandler,
        func: Callable[[Any], bool] | None = None,
        override: bool = False,
        ignore_warnings: bool = False,
    ) -> None:
        """Handle leaves of a type.

        Args:
            ty: The type.
            handler: An instance.
            func: Decides whether a type is handled; by default if it is `ty` or a subclass.
            override: Replace the handler that `ty` has.
            ignore_warnings: Do not log a replacement.

        Raises:
            ValueError: If `ty` has a handler, or another type has one with the same `typestr`, unless
                `override` is set.
        """
        ...

    def get(self, ty: Any) -> TypeHandler:
        """Return the handler of a type, or of a recorded type name.

        Raises:
            ValueError: If there is none.
        """
        ...

    def has(self, ty: Any) -> bool:
        """Whether there is a handler of a type, or of a recorded type name."""
        ...


@final
class PlaceholderHandler(TypeHandler):
    """Handles `...` in a target: the leaf is not read, and the result has `...` there."""

    def typestr(self) -> str:
        """`placeholder`, which is never recorded."""
        return "placeholder"

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Refuse: a placeholder is not stored."""
        raise NotImplementedError("a placeholder has no metadata")

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Waitable]:
        """Refuse: there is nothing to save."""
        raise NotImplementedError("a placeholder cannot be saved")

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[Any]:
        """Return placeholders."""
        return [PLACEHOLDER] * len(infos)


def create_type_handler_registry(*handlers: tuple[Any, TypeHandler]) -> TypeHandlerRegistry:
    """Make a registry of only these types and handlers."""
    return _Registry(*handlers)


def default_entries() -> tuple[tuple[Any, TypeHandler], ...]:
    """Make a handler for each type that Orbax handles by default, in its order."""
    return (
        (int, ScalarHandler()),
        (float, ScalarHandler()),
        (bytes, ScalarHandler()),
        (np.number, ScalarHandler()),
        (np.ndarray, NumpyHandler()),
        (jax.Array, ArrayHandler(array_metadata_store=Store())),
        (str, StringHandler()),
        (type(PLACEHOLDER), PlaceholderHandler()),
    )


def standard_registry(otherwise: Callable[[Any], TypeHandler | None]) -> TypeHandlerRegistry:
    """Make a registry of these.

    Args:
        otherwise: Asked for a type, or a recorded type name, that nobody registered.
    """
    return _Registry(*default_entries(), otherwise=otherwise)


def stage_registry(registry: Any, workers: StageWorkers | None = None) -> HandlerLookup:
    """Return Orbax's registry as a `penstock.Checkpointer` takes one.

    Args:
        registry: Has `get` and `has`.
        workers: Makes the handlers of one save or restore.
    """
    return StageRegistry(registry, workers or StageWorkers())


@final
@dataclass(frozen=True, slots=True)
class _Entry:
    type_: Any
    fits: Callable[[Any], bool]
    handler: TypeHandler


@final
class _Registry(TypeHandlerRegistry):
    """Thread-safe."""

    def __init__(
        self,
        *handlers: tuple[Any, TypeHandler],
        otherwise: Callable[[Any], TypeHandler | None] | None = None,
    ) -> None:
        self._lock = RLock()
        self._entries: list[_Entry] = []
        self._by_typestr: dict[str, TypeHandler] = {}
        self._otherwise = otherwise
        for type_, handler in handlers:
            self.add(type_, handler, override=True, ignore_warnings=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Registry:
        """A registry with copies of the handlers; those that cannot be copied are shared."""
        copied = _Registry(otherwise=self._otherwise)
        with self._lock:
            handlers = {id(handler): _copied(handler) for handler in self._by_typestr.values()}
            copied._entries = [
                _Entry(entry.type_, entry.fits, handlers.get(id(entry.handler), entry.handler))
                for entry in self._entries
            ]
            copied._by_typestr = {
                typestr: handlers[id(handler)] for typestr, handler in self._by_typestr.items()
            }

        return copied

    def add(
        self,
        ty: Any,
        handler: TypeHandler,
        func: Callable[[Any], bool] | None = None,
        override: bool = False,
        ignore_warnings: bool = False,
    ) -> None:
        entry = _Entry(ty, _subclass_of(ty) if func is None else func, handler)
        typestr = handler.typestr()
        with self._lock:
            before = next((at for at, known in enumerate(self._entries) if known.fits(ty)), None)
            if before is not None and not override:
                raise ValueError(f"a type handler for {ty} is registered already; pass override=True")
            if before is None and typestr in self._by_typestr and not override:
                raise ValueError(
                    f"the typestr {typestr!r} of the handler for {ty} is taken; pass override=True"
                )

            if before is None:
                self._entries.append(entry)
            elif self._entries[before].type_ is ty:
                self._entries[before] = entry
            else:
                # A more specific type goes first; the more general one keeps its handler.
                self._entries.insert(before, entry)

            self._by_typestr[typestr] = handler

    def get(self, ty: Any) -> TypeHandler:
        with self._lock:
            if isinstance(ty, str):
                if ty in self._by_typestr:
                    return self._by_typestr[ty]
            else:
                for entry in self._entries:
                    if entry.fits(ty):
                        return entry.handler

        found = None if self._otherwise is None else self._otherwise(ty)
        if found is not None:
            return found

        raise ValueError(f"no type handler is registered for {ty!r}")

    def has(self, ty: Any) -> bool:
        try:
            self.get(ty)
        except ValueError:
            return False

        return True


def _copied(handler: TypeHandler) -> TypeHandler:
    try:
        return copy.deepcopy(handler)
    except TypeError:  # it holds a lock, or an executor
        return copy.copy(handler)


def _subclass_of(type_: Any) -> Callable[[Any], bool]:
    return lambda other: issubclass(other, type_)
