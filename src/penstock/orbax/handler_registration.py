"""Registries of handlers, by item and class of arguments."""

from __future__ import annotations

__all__ = (
    "AlreadyExistsError",
    "CheckpointHandlerRegistry",
    "DefaultCheckpointHandlerRegistry",
    "NoEntryError",
    "create_default_handler_registry",
)

from collections.abc import MutableMapping
from typing import Any, Protocol, TypeAlias, cast

from penstock.orbax.checkpoint_args import (
    CheckpointArgs,
    CheckpointHandler,
    get_registered_args_cls,
    get_registered_handler_cls,
)

ArgsOrType: TypeAlias = "type[CheckpointArgs] | CheckpointArgs"
HandlerRegistryMapping: TypeAlias = "MutableMapping[tuple[str | None, type[CheckpointArgs]], Any]"


class AlreadyExistsError(ValueError):
    """An item and arguments have a handler already."""


class NoEntryError(KeyError):
    """An item and arguments have no handler."""


class CheckpointHandlerRegistry(Protocol):
    """Handlers by item and class of arguments; None stands for any item."""

    def add(
        self,
        item: str | None,
        args: ArgsOrType,
        handler: CheckpointHandler | type[CheckpointHandler] | None = None,
        **kwargs: Any,
    ) -> None: ...
    def get(self, item: str | None, args: ArgsOrType) -> Any: ...
    def has(self, item: str | None, args: ArgsOrType) -> bool: ...
    def get_all_entries(self) -> HandlerRegistryMapping: ...


class DefaultCheckpointHandlerRegistry(CheckpointHandlerRegistry):
    """Handlers by item and class of arguments.

    Args:
        other_registry: Its entries are copied.
    """

    def __init__(self, other_registry: CheckpointHandlerRegistry | None = None) -> None:
        self._registry: dict[tuple[str | None, type[CheckpointArgs]], Any] = {}
        if other_registry is not None:
            self._registry.update(other_registry.get_all_entries())

    def add(  # type: ignore[override]  # as in Orbax, it takes no others
        self,
        item: str | None,
        args: ArgsOrType,
        handler: CheckpointHandler | type[CheckpointHandler] | None = None,
    ) -> None:
        """Register the handler of an item for a class of arguments.

        Args:
            item: Its name; None for every item without an entry of its own.
            args: The class of arguments, or an instance.
            handler: The handler, or its class; by default the one that the arguments are registered with.

        Raises:
            AlreadyExistsError: If there is such an entry already.
            ValueError: If there is no such handler, or it cannot be made without arguments.
        """
        args_cls = _class_of(args)
        if self.has(item, args_cls):
            raise AlreadyExistsError(
                f"Entry for item={item} and args_type={args_cls} already exists in the registry."
            )

        chosen: Any = handler
        if handler is None:
            try:
                chosen = get_registered_handler_cls(args_cls)
            except ValueError as error:
                raise ValueError(
                    f"Provided a `None` `CheckpointHandler` for item={item} and args_type={args_cls}, "
                    "and none is registered with it"
                ) from error
        if isinstance(chosen, type):
            try:
                chosen = cast("Any", chosen)()
            except TypeError as error:
                raise ValueError(
                    f"the handler of item={item} and args_type={args_cls} is not default-constructible"
                ) from error

        self._registry[item, args_cls] = chosen

    def get(self, item: str | None, args: ArgsOrType) -> Any:
        """Return the handler.

        Raises:
            NoEntryError: If there is none.
        """
        args_cls = _class_of(args)
        if not self.has(item, args_cls):
            raise NoEntryError(f"No entry for item={item} and args_ty={args_cls} in the registry.")

        return self._registry[item, args_cls]

    def has(self, item: str | None, args: ArgsOrType) -> bool:
        """Return whether there is a handler."""
        return (item, _class_of(args)) in self._registry

    def get_all_entries(self) -> HandlerRegistryMapping:
        """Return all handlers, by item and class of arguments."""
        return self._registry

    def __repr__(self) -> str:
        return f"DefaultCheckpointHandlerRegistry({self._registry})"


def create_default_handler_registry(**items_to_handlers: CheckpointHandler) -> CheckpointHandlerRegistry:
    """Return a registry of handlers by item, each with the arguments that are registered with it."""
    registry = DefaultCheckpointHandlerRegistry()
    for item, handler in items_to_handlers.items():
        save_cls, restore_cls = get_registered_args_cls(handler)
        registry.add(item, save_cls, handler)
        registry.add(item, restore_cls, handler)

    return registry


def _class_of(args: ArgsOrType) -> type[CheckpointArgs]:
    return args if isinstance(args, type) else type(args)
