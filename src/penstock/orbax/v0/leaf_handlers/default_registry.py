"""The registry of type handlers that a process shares, and questions about types."""

from __future__ import annotations

__all__ = (
    "default_registry",
    "get_type_handler",
    "has_type_handler",
    "is_placeholder",
    "is_supported_empty_value",
    "is_supported_type",
    "register_standard_handlers_with_options",
    "register_type_handler",
    "supported_types",
)

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import jax
import numpy as np

from penstock.orbax.substitution.counterparts import loaded_orbax
from penstock.orbax.v0.leaf_handlers.array_handler import ArrayHandler
from penstock.orbax.v0.leaf_handlers.numpy_handlers import NumpyHandler, ScalarHandler
from penstock.orbax.v0.leaf_handlers.type_handler import TypeHandler
from penstock.orbax.v0.leaf_handlers.type_handler_registry import (
    PLACEHOLDER,
    TypeHandlerRegistry,
    default_entries,
    standard_registry,
)


def _registered_with_orbax(ty: Any) -> TypeHandler | None:
    theirs = loaded_orbax("type_handlers")
    if theirs is None or not theirs.has_type_handler(ty):
        return None

    return cast("TypeHandler", theirs.get_type_handler(ty))


# Orbax's API registers handlers for the whole process, and its users rely on a module that was imported
# somewhere having done so: the one mutable object of the API. It has a lock of its own. Handlers take
# a registry of their own instead wherever one is given. A library that was written for Orbax registers with
# Orbax, so that is asked for types which nobody registered here.
_PROCESS_WIDE: Final = standard_registry(otherwise=_registered_with_orbax)


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
    """Whether a type, or a recorded type name, has a handler in this process."""
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
    """Whether this stands for a leaf that is not read."""
    return value is PLACEHOLDER


def is_supported_type(value: Any, pytree_metadata_options: Any = None) -> bool:
    """Whether a value can be saved without a custom handler."""
    known = (str, int, float, np.number, np.ndarray, bytes, jax.Array)
    return isinstance(value, known) or is_supported_empty_value(value, pytree_metadata_options)


def is_supported_empty_value(value: Any, pytree_metadata_options: Any = None) -> bool:
    """Whether a value is None or an empty container whose kind is recorded."""
    if isinstance(value, tuple) and hasattr(cast("object", value), "_fields"):
        return not value and bool(getattr(pytree_metadata_options, "support_rich_types", False))

    return value is None or (isinstance(value, dict | list | tuple | Mapping) and not value)
