"""Handler classes by the name that `_CHECKPOINT_METADATA` records for them.

Orbax's API registers classes for the whole process, by a decorator, so there is one table per process.
"""

from __future__ import annotations

__all__ = ("HandlerTypeRegistry", "get_handler_type", "register_handler_type")

from contextlib import suppress
from importlib import import_module
from threading import Lock
from typing import Any, Final, TypeVar

from penstock.orbax.substitution.counterparts import loaded_orbax

HandlerT = TypeVar("HandlerT", bound=type[Any])
_OWN_HANDLERS: Final = "penstock.orbax.handlers"
_V0: Final = ("orbax.checkpoint.v0._src.", "orbax.checkpoint._src.")
_EARLIER: Final = {
    "penstock.orbax.handlers.base_pytree.BasePyTreeCheckpointHandler": (
        "orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler.BasePyTreeCheckpointHandler"
    ),
}
"""What earlier versions of penstock recorded, and what is recorded now."""


class HandlerTypeRegistry:
    """Handler classes by `typestr()`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._registry: dict[str, type[Any]] = {}

    def add(self, handler_type: type[Any]) -> None:
        """Add a class. It replaces an earlier one of the same module and name.

        Raises:
            ValueError: If another class has the same `typestr()`.
        """
        name = _typestr(handler_type)
        with self._lock:
            known = self._registry.get(name)
            if known is not None and _path(known) != _path(handler_type):
                raise ValueError(
                    f'Handler type string "{name}" already exists in the registry with type {known}. '
                    f"Cannot add type {handler_type}."
                )

            self._registry[name] = handler_type

    def get(self, handler_typestr: str) -> type[Any]:
        """Return the class with a name.

        Raises:
            KeyError: If there is none.
        """
        with self._lock:
            text = str(handler_typestr)
            names = (handler_typestr, text.replace(*_V0, 1), _EARLIER.get(text))
            for name in names:
                if name is not None and name in self._registry:
                    return self._registry[name]

        theirs = _of_orbax(text)
        if theirs is not None:
            return theirs

        raise KeyError(f'Handler type string "{handler_typestr}" not found in the registry.')


def register_handler_type(handler_cls: HandlerT) -> HandlerT:
    """Make a handler class known to the whole process; see `HandlerTypeRegistry.add`."""
    _PROCESS_WIDE.add(handler_cls)
    return handler_cls


def get_handler_type(handler_typestr: str) -> type[Any]:
    """Return the handler class with a recorded name; see `HandlerTypeRegistry.get`."""
    try:
        return _PROCESS_WIDE.get(handler_typestr)
    except KeyError:
        # The program may have used no name of the module that registers the class.
        import_module(_OWN_HANDLERS)
        return _PROCESS_WIDE.get(handler_typestr)


def _of_orbax(typestr: str) -> type[Any] | None:
    """Return the handler with a recorded name whose arguments are registered with Orbax."""
    theirs = loaded_orbax("checkpoint_args")
    if theirs is None:
        return None

    ahead: list[type[Any]] = theirs.CheckpointArgs.__subclasses__()
    while ahead:
        args_cls = ahead.pop()
        with suppress(ValueError):  # nobody's
            handler_type: type[Any] = theirs.get_registered_handler_cls(args_cls)
            if _typestr(handler_type) == typestr:
                return handler_type
        ahead.extend(args_cls.__subclasses__())

    return None


def _typestr(handler_type: type[Any]) -> str:
    typestr = getattr(handler_type, "typestr", None)
    return ".".join(_path(handler_type)) if typestr is None else str(typestr())


def _path(handler_type: type[Any]) -> tuple[str, str]:
    return handler_type.__module__, handler_type.__qualname__


_PROCESS_WIDE: Final = HandlerTypeRegistry()
