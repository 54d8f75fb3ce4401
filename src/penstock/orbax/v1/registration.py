"""Which handler an object goes to."""

from __future__ import annotations

__all__ = (
    "AlreadyExistsError",
    "CheckpointableHandlerRegistry",
    "NoEntryError",
    "NotHandleableError",
    "ReadOnlyCheckpointableHandlerRegistry",
    "add_all",
    "default_registry",
    "global_registry",
    "local_registry",
    "register_handler",
)

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar, final

from penstock.kernel.errors import HandlerError

HandlerType: TypeAlias = type[Any]
RegistryEntry: TypeAlias = tuple[HandlerType, str | None]
HandlerT = TypeVar("HandlerT", bound=type[Any])


class AlreadyExistsError(HandlerError, ValueError):
    """A registry has this handler, or one for this name, already."""


class NoEntryError(HandlerError, KeyError):
    """No handler of a registry fits."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NotHandleableError(HandlerError, ValueError):
    """A handler cannot handle an object."""


class CheckpointableHandlerRegistry(Protocol):
    """Handlers in the order in which they were added."""

    def add(
        self,
        handler_type: HandlerType,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> CheckpointableHandlerRegistry:
        """Add a handler, for one name or for all; return the registry."""
        ...

    def get(self, checkpointable_name: str) -> HandlerType:
        """Return the handler added for a name."""
        ...

    def has(self, checkpointable_name: str) -> bool:
        """Whether a handler was added for a name."""
        ...

    def get_all_entries(self) -> Sequence[RegistryEntry]:
        """Return all handlers, each with its name if it has one."""
        ...

    def get_secondary_typestrs(self, handler_type: HandlerType) -> Sequence[str]:
        """Return by which other recorded names a handler is known."""
        ...


@final
class _Registry(CheckpointableHandlerRegistry):
    def __init__(self) -> None:
        self._entries: list[RegistryEntry] = []
        self._typestrs: dict[HandlerType, Sequence[str]] = {}

    def add(
        self,
        handler_type: HandlerType,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> CheckpointableHandlerRegistry:
        """Add a handler.

        Raises:
            ValueError: If it is no class.
            AlreadyExistsError: If there is one for the name; without a name, if the handler is there.
        """
        given: object = handler_type
        if not isinstance(given, type):
            raise ValueError(f"The `handler_type` must be a type, but got {given}.")  # noqa: TRY004 - Orbax's
        if checkpointable_name:
            if self.has(checkpointable_name):
                raise AlreadyExistsError(
                    f"Entry for checkpointable_name={checkpointable_name} already exists in the registry."
                )
        elif any(handler_type is known for known, _ in self._entries):
            raise AlreadyExistsError(f"Handler type {handler_type} already exists in the registry.")

        self._entries.append((handler_type, checkpointable_name))
        if secondary_typestrs is not None:
            self._typestrs[handler_type] = secondary_typestrs

        return self

    def get(self, checkpointable_name: str) -> HandlerType:
        """Return the handler added for a name.

        Raises:
            NoEntryError: If there is none.
        """
        for handler_type, name in self._entries:
            if name == checkpointable_name:
                return handler_type

        raise NoEntryError(f"No entry for checkpointable_name={checkpointable_name} in the registry.")

    def has(self, checkpointable_name: str) -> bool:
        return any(name == checkpointable_name for _, name in self._entries)

    def get_all_entries(self) -> Sequence[RegistryEntry]:
        return self._entries

    def get_secondary_typestrs(self, handler_type: HandlerType) -> Sequence[str]:
        return self._typestrs.get(handler_type, [])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._entries})"


@final
class ReadOnlyCheckpointableHandlerRegistry(CheckpointableHandlerRegistry):
    """A registry to which nothing can be added."""

    def __init__(self, registry: CheckpointableHandlerRegistry) -> None:
        self._registry = registry

    def add(
        self,
        handler_type: HandlerType,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> CheckpointableHandlerRegistry:
        raise NotImplementedError("Adding not implemented for read-only registry.")

    def get(self, checkpointable_name: str) -> HandlerType:
        return self._registry.get(checkpointable_name)

    def has(self, checkpointable_name: str) -> bool:
        return self._registry.has(checkpointable_name)

    def get_all_entries(self) -> Sequence[RegistryEntry]:
        return self._registry.get_all_entries()

    def get_secondary_typestrs(self, handler_type: HandlerType) -> Sequence[str]:
        return self._registry.get_secondary_typestrs(handler_type)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_all_entries()})"


_GLOBAL: Final[CheckpointableHandlerRegistry] = _Registry()
"""What `register_handler` adds to: Orbax's API has a registry of the process."""


def global_registry() -> CheckpointableHandlerRegistry:
    """Return the registry of the process, which `register_handler` adds to."""
    return _GLOBAL


def local_registry(
    other_registry: CheckpointableHandlerRegistry | None = None,
    *,
    include_global_registry: bool = True,
) -> CheckpointableHandlerRegistry:
    """Return a new registry, with the handlers of others.

    Args:
        other_registry: Whose handlers are added.
        include_global_registry: Whether those of the process are, before.
    """
    registry: CheckpointableHandlerRegistry = _Registry()
    if include_global_registry:
        add_all(registry, _GLOBAL)
    if other_registry is not None:
        add_all(registry, other_registry)

    return registry


def default_registry() -> CheckpointableHandlerRegistry:
    """Return what a context begins with: the handlers of the process as they are now, read-only."""
    return ReadOnlyCheckpointableHandlerRegistry(local_registry())


def add_all(
    registry: CheckpointableHandlerRegistry, other_registry: CheckpointableHandlerRegistry
) -> CheckpointableHandlerRegistry:
    """Add to a registry all handlers of another one; return it."""
    for handler_type, name in other_registry.get_all_entries():
        registry.add(
            handler_type,
            checkpointable_name=name,
            secondary_typestrs=other_registry.get_secondary_typestrs(handler_type),
        )

    return registry


def register_handler(
    cls: HandlerT,
    *,
    checkpointable_name: str | None = None,
    secondary_typestrs: Sequence[str] | None = None,
) -> HandlerT:
    """Add a handler to the registry of the process; return it, so that this can decorate a class."""
    _GLOBAL.add(cls, checkpointable_name=checkpointable_name, secondary_typestrs=secondary_typestrs)
    return cls
