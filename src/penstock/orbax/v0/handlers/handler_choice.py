"""Which handlers the items of a `CompositeCheckpointHandler` go to."""

from __future__ import annotations

__all__ = ("ItemHandlers",)

from collections.abc import Mapping, Sequence
from typing import Any, final

from penstock.orbax.v0.common.checkpoint_args import (
    CheckpointArgs,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
)
from penstock.orbax.v0.handlers.handler_registration import (
    CheckpointHandlerRegistry,
    DefaultCheckpointHandlerRegistry,
)
from penstock.orbax.v0.handlers.legacy_handler import WrapperArgs, get_legacy_handler_wrapper


@final
class ItemHandlers:
    """Handlers by item. Each is given, or determined by the first arguments of its item.

    Args:
        names: Items whose handler is not known yet.
        handlers: By item; None where it is not known yet.
        registry: Handlers by item and class of arguments; excludes the other two.
    """

    def __init__(
        self, names: Sequence[str], handlers: Mapping[str, Any], registry: CheckpointHandlerRegistry | None
    ) -> None:
        self.registry: CheckpointHandlerRegistry = DefaultCheckpointHandlerRegistry(registry)
        self.undetermined: set[str] | None = None  #: None unless item names were given
        self._told: set[str] = set()  # items whose handler is determined
        if not names and not handlers:
            self._told = {name for name, _ in self.unique()}
            return

        self.undetermined = {name for name in names if name not in handlers}
        for name, handler in handlers.items():
            if handler is None:
                self.undetermined.add(name)
            elif has_registered_args(handler):
                self._add(name, handler)
            else:
                self.registry.add(name, WrapperArgs, get_legacy_handler_wrapper(handler))

    def unique(self) -> list[tuple[str, Any]]:
        """Return each item with each of its handlers."""
        found: list[tuple[str, Any]] = []
        for (name, _), handler in self.registry.get_all_entries().items():
            if name is not None and (name, handler) not in found:
                found.append((name, handler))

        return found

    def all(self) -> list[tuple[str, Any]]:
        """Return each item with each of its handlers, or with None where it is not known yet."""
        return [*self.unique(), *[(name, None) for name in sorted(self.undetermined or ())]]

    def choose(self, name: str, args: CheckpointArgs | None) -> Any:
        """Return the handler of an item, given its arguments.

        Args:
            name: Of the item.
            args: The arguments; None if the handler must be known.

        Raises:
            ValueError: If there is none, or the item has another handler already.
        """
        if args is None:
            return self._known(name)

        if self.registry.has(name, args):
            return self.registry.get(name, args)
        if self.registry.has(None, args):
            handler = self.registry.get(None, args)
            self.registry.add(name, args, handler)
            return handler

        handler = get_registered_handler_cls(args)()
        if self.undetermined is None:
            new = name not in self._told
            self._told.add(name)
        else:
            new = name in self.undetermined
            self.undetermined.discard(name)
        if not new:
            raise ValueError(
                f'Item "{name}" and args "{args}" does not match with any registered handler! '
                f"Registered handlers: {list(self.registry.get_all_entries().items())}"
            )

        self._add(name, handler)
        return handler

    def _known(self, name: str) -> Any:
        for item, handler in self.unique():
            if item == name:
                return handler

        raise ValueError(
            f'Provided `None` for `CheckpointArgs`, and the `CheckpointHandler` for item "{name}" was not '
            "configured: give the arguments of its handler"
        )

    def _add(self, name: str, handler: Any) -> None:
        for args_cls in dict.fromkeys(get_registered_args_cls(handler)):
            self.registry.add(name, args_cls, handler)
