"""One checked registration: a type that can be looked up, and its handler."""

from __future__ import annotations

__all__ = (
    "Entry",
    "MakesWorker",
    "entries_of",
    "entry_of",
    "handler_name",
    "type_name",
)

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast, final, runtime_checkable

from penstock.kernel.entry_points import Plugin
from penstock.kernel.errors import HandlerError
from penstock.kernel.plugins.adapted_handler import AdaptedHandler
from penstock.kernel.protocols.capability import Capability
from penstock.kernel.protocols.leaf_handlers import LeafHandler, TypeHandler

_STREAMING = frozenset({"typestr", "describe", "pieces", "target", "build"})
_BATCH = frozenset({"typestr", "serialize", "deserialize", "metadata", "memory_size", "finalize"})


@runtime_checkable
class MakesWorker(Capability, Protocol):
    """A handler of another library that supplies its own penstock handler."""

    def stage_worker(self) -> LeafHandler: ...


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """A type and what handles it."""

    type_: type
    given: object  #: what was registered, before it was adapted
    handler: LeafHandler


def entry_of(type_: object, handler: object) -> Entry:
    """Check a type and a handler, and adapt the handler if it has the batch protocol only.

    Raises:
        HandlerError: If `issubclass` does not accept the type, or the handler is not one.
    """
    return Entry(_checked(type_), handler, _adapted(handler))


def entries_of(plugin: Plugin) -> list[Entry]:
    """Load an entry point and check what it returns. Blocking.

    Raises:
        HandlerError: If it is broken in any way; the message names its distribution.
    """
    try:
        handlers = _mapping(plugin.load()())
        return [entry_of(type_, handler) for type_, handler in handlers.items()]
    except Exception as error:
        problem = str(error) if isinstance(error, HandlerError) else f"{type(error).__name__}: {error}"
        raise HandlerError(f"{plugin} is broken: {problem}") from error


def type_name(type_: type) -> str:
    """Return a type's usual name: `int`, `numpy.ndarray`."""
    name = type_.__qualname__
    return name if type_.__module__ == "builtins" else f"{type_.__module__}.{name}"


def handler_name(handler: object) -> str:
    """Name a handler by its class, looking through the adapter."""
    return handler.name if isinstance(handler, AdaptedHandler) else type_name(type(handler))


def _mapping(returned: object) -> Mapping[object, object]:
    if not isinstance(returned, Mapping):
        raise HandlerError(f"it returned {returned!r}, not a mapping from type to handler")

    return cast("Mapping[object, object]", returned)


def _checked(type_: object) -> type:
    try:
        issubclass(bool, cast("type", type_))  # a protocol that is not runtime_checkable refuses
    except TypeError as error:
        raise HandlerError(f"{type_!r} cannot be registered: {error}") from error

    if not isinstance(type_, type):
        raise HandlerError(f"{type_!r} cannot be registered: it is not a class")

    return type_


def _adapted(handler: object) -> LeafHandler:
    if isinstance(handler, AdaptedHandler):
        return handler
    if isinstance(handler, type):
        raise HandlerError(f"{type_name(handler)} is a class; register an instance of it")
    if isinstance(handler, MakesWorker):
        return handler.stage_worker()  # its own methods only resemble the batch protocol

    members = dir(handler)
    not_streaming, not_batch = _STREAMING.difference(members), _BATCH.difference(members)
    if not not_streaming:
        return cast("LeafHandler", handler)
    if not not_batch:
        return AdaptedHandler(cast("TypeHandler", handler))

    lacking = not_streaming if len(not_streaming) < len(not_batch) else not_batch
    raise HandlerError(f"{handler_name(handler)} is not a handler: it has no {', '.join(sorted(lacking))}")
