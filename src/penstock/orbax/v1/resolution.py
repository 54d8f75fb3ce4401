"""Which of the registered handlers saves or loads an object."""

from __future__ import annotations

__all__ = ("handler_for_load", "handler_for_save")

from collections.abc import Callable
from typing import Any

from penstock.kernel.events import get_logger
from penstock.orbax.v1.handler_types import StatefulCheckpointable, typestr
from penstock.orbax.v1.names import STATE
from penstock.orbax.v1.registration import CheckpointableHandlerRegistry, NoEntryError


def handler_for_save(registry: CheckpointableHandlerRegistry, checkpointable: Any, *, name: str) -> Any:
    """Return a handler for an object.

    An object that saves itself does. Else the handler registered for the name is taken, and else the
    one registered last of those that can handle the object.

    Raises:
        ValueError: If the object is None.
        NoEntryError: If no handler fits.
    """
    if checkpointable is None:
        raise ValueError("checkpointable must not be None for saving.")

    fitting = _last_fitting(registry, lambda handler: handler.is_handleable(checkpointable))
    if fitting is not None and isinstance(checkpointable, StatefulCheckpointable):
        return fitting
    if registry.has(name):
        return _make(name, registry.get(name))
    if fitting is not None:
        return fitting

    raise NoEntryError(
        f'Could not identify a valid handler for the checkpointable: "{name}" and checkpointable '
        f"type={type(checkpointable)}. Register one with `register_handler`, or in a local registry "
        f"(`CheckpointablesOptions`), whose `is_handleable` says yes to it. There are: {_types(registry)}"
    )


def handler_for_load(
    registry: CheckpointableHandlerRegistry, abstract: Any, *, name: str, recorded: str | None
) -> Any:
    """Return a handler for what was saved under a name.

    Args:
        registry: The handlers.
        abstract: What is asked for; None for what was saved.
        name: Of the item.
        recorded: The handler that saved it, as the checkpoint says; None if it does not.

    Raises:
        NoEntryError: If no handler fits.
    """
    named = _make(name, registry.get(name)) if registry.has(name) else None
    saver = _by_typestr(registry, recorded) if recorded else None
    if recorded and saver is None:
        get_logger().warning("load.handler_unknown", item=name, handler=recorded)

    def fits(handler: Any) -> bool:
        return abstract is None or bool(handler.is_abstract_handleable(abstract))

    stateful = abstract is not None and isinstance(abstract, StatefulCheckpointable)
    order = (saver, named) if stateful else (named, saver)
    for handler in order:
        if handler is not None and fits(handler):
            return handler

    found = None if abstract is None else _last_fitting(registry, fits)
    if found is None and named is None and registry.has(STATE):
        found = _make(name, registry.get(STATE))  # what nobody knows is a tree, if anything
    if found is not None or named is not None:
        return found or named

    raise NoEntryError(
        f"Could not resolve a handler for {name!r}, saved by {recorded} and asked for as {abstract!r}, and "
        f"no {STATE!r} handler is registered. There are: {_types(registry)}"
    )


def _by_typestr(registry: CheckpointableHandlerRegistry, recorded: str) -> Any:
    for handler_type, name in reversed(registry.get_all_entries()):
        if typestr(handler_type) == recorded or recorded in registry.get_secondary_typestrs(handler_type):
            return _make(name, handler_type)

    return None


def _last_fitting(registry: CheckpointableHandlerRegistry, fits: Callable[[Any], Any]) -> Any:
    """Of the handlers for any name, return the one added last that fits."""
    handlers = [_make(name, kind) for kind, name in registry.get_all_entries() if name is None]
    return next((handler for handler in reversed(handlers) if fits(handler)), None)


def _make(name: str | None, handler_type: type[Any]) -> Any:
    try:
        return handler_type()
    except TypeError as error:
        raise ValueError(
            f"the handler {handler_type} for checkpointable={name} could not be default-constructed"
        ) from error


def _types(registry: CheckpointableHandlerRegistry) -> list[type[Any]]:
    return [handler_type for handler_type, _ in registry.get_all_entries()]
