"""The module `type_handlers` of Orbax's API: type handlers, and the registries that find one for a leaf."""

from __future__ import annotations

__all__ = (
    "PLACEHOLDER",
    "ArrayHandler",
    "ArrayRestoreArgs",
    "InvalidShardingError",
    "NumpyHandler",
    "ParamInfo",
    "PlaceholderHandler",
    "RestoreArgs",
    "SaveArgs",
    "ScalarHandler",
    "SingleReplicaArrayHandler",
    "SingleReplicaArrayRestoreArgs",
    "StringHandler",
    "TypeHandler",
    "TypeHandlerRegistry",
    "check_input_arguments",
    "create_type_handler_registry",
    "default_registry",
    "get_cast_tspec_deserialize",
    "get_cast_tspec_serialize",
    "get_json_tspec_read",
    "get_json_tspec_write",
    "get_ts_context",
    "get_type_handler",
    "has_type_handler",
    "is_ocdbt_checkpoint",
    "is_placeholder",
    "is_supported_empty_value",
    "is_supported_type",
    "merge_ocdbt_per_process_files",
    "register_standard_handlers_with_options",
    "register_type_handler",
    "supported_types",
)

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, Final, Protocol, cast, final, runtime_checkable

import jax
import numpy as np

from penstock import kernel
from penstock.orbax.array_metadata_store import Store
from penstock.orbax.installation import loaded_orbax
from penstock.orbax.leaf_args import (
    ArrayRestoreArgs,
    ParamInfo,
    RestoreArgs,
    SaveArgs,
    SingleReplicaArrayRestoreArgs,
    check_input_arguments,
)
from penstock.orbax.leaf_type_handlers import (
    ArrayHandler,
    InvalidShardingError,
    NumpyHandler,
    ScalarHandler,
    SingleReplicaArrayHandler,
    StringHandler,
)
from penstock.orbax.serialization import (
    get_cast_tspec_deserialize,
    get_cast_tspec_serialize,
    get_json_tspec_read,
    get_json_tspec_write,
    get_ts_context,
    is_ocdbt_checkpoint,
    merge_ocdbt_per_process_files,
)
from penstock.orbax.stage_workers import TypeHandler

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
        """Return whether there is a handler of a type, or of a recorded type name."""
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
    ) -> Sequence[kernel.Waitable]:
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


def _registered_with_orbax(ty: Any) -> TypeHandler | None:
    theirs = loaded_orbax("type_handlers")
    if theirs is None or not theirs.has_type_handler(ty):
        return None

    return cast("TypeHandler", theirs.get_type_handler(ty))


# Orbax's API registers handlers for the whole process, and its users rely on a module that was imported
# somewhere having done so: the one mutable object of the API. It has its own lock. Handlers take
# a registry of their own instead wherever one is given. A library that was written for Orbax registers with
# Orbax, so that is asked for types which nobody registered here.
_PROCESS_WIDE: Final = _Registry(*default_entries(), otherwise=_registered_with_orbax)


def default_registry() -> TypeHandlerRegistry:
    """Return the registry of the process, which is used where none is given."""
    return _PROCESS_WIDE


def register_type_handler(
    ty: Any, handler: TypeHandler, func: Callable[[Any], bool] | None = None, override: bool = False
) -> None:
    """Handle leaves of a type, in the whole process.

    Args:
        ty: The type.
        handler: An instance.
        func: Decides whether a type is handled; by default if it is `ty` or a subclass.
        override: Replace the handler that `ty` has.

    Raises:
        ValueError: If `ty` has a handler, or another type has one of the same `typestr`, unless overridden.
    """
    _PROCESS_WIDE.add(ty, handler, func, override)


def get_type_handler(ty: Any) -> TypeHandler:
    """Return the handler of a type, or of a recorded type name, in this process.

    Raises:
        ValueError: If there is none.
    """
    return _PROCESS_WIDE.get(ty)


def has_type_handler(ty: Any) -> bool:
    """Return whether a type, or a recorded type name, has a handler in this process."""
    return _PROCESS_WIDE.has(ty)


def register_standard_handlers_with_options(**kwargs: Any) -> None:
    """Replace the handlers of numbers and arrays by new ones with these options, in the whole process.

    Args:
        **kwargs: Of each of the handlers; `use_ocdbt` and `ts_context` are ignored.
    """
    for name in ("use_ocdbt", "ts_context"):
        kwargs.pop(name, None)

    numbers: tuple[Any, ...] = (int, float, bytes, np.number)
    for ty in numbers:
        _PROCESS_WIDE.add(ty, ScalarHandler(**kwargs), override=True)

    _PROCESS_WIDE.add(np.ndarray, NumpyHandler(**kwargs), override=True)
    _PROCESS_WIDE.add(jax.Array, ArrayHandler(**kwargs), override=True)


def supported_types() -> list[Any]:
    """Return the types that have a handler from the beginning."""
    return [ty for ty, _ in default_entries()]


def is_placeholder(value: Any) -> bool:
    """Return whether this stands for a leaf that is not read."""
    return value is PLACEHOLDER


def is_supported_type(value: Any, pytree_metadata_options: Any = None) -> bool:
    """Return whether a value can be saved without a custom handler."""
    known = (str, int, float, np.number, np.ndarray, bytes, jax.Array)
    return isinstance(value, known) or is_supported_empty_value(value, pytree_metadata_options)


def is_supported_empty_value(value: Any, pytree_metadata_options: Any = None) -> bool:
    """Return whether a value is None or an empty container whose kind is recorded."""
    if isinstance(value, tuple) and hasattr(cast("object", value), "_fields"):
        return not value and bool(getattr(pytree_metadata_options, "support_rich_types", False))

    return value is None or (isinstance(value, dict | list | tuple | Mapping) and not value)
