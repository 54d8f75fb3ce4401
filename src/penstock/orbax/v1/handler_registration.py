"""Handlers of checkpointables, and the registries that find one for an object or for what was saved."""

from __future__ import annotations

__all__ = (
    "AUTO",
    "METRICS",
    "RESERVED",
    "STATE",
    "AbstractCheckpointable",
    "AlreadyExistsError",
    "Checkpointable",
    "CheckpointableHandler",
    "CheckpointableHandlerRegistry",
    "NoEntryError",
    "NotHandleableError",
    "ReadOnlyCheckpointableHandlerRegistry",
    "StatefulCheckpointable",
    "add_all",
    "check_item_names",
    "check_one_name",
    "default_registry",
    "global_registry",
    "handler_for_load",
    "local_registry",
    "register_handler",
    "resolve_handler_for_load",
    "resolve_handler_for_save",
    "typestr",
)

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast, final, runtime_checkable

from penstock import kernel
from penstock.errors import HandlerError
from penstock.orbax.checkpoint_args import AlreadyExistsError, NoEntryError
from penstock.orbax.v1.path import Path, PathAwaitingCreation

Checkpointable: TypeAlias = Any

AbstractCheckpointable: TypeAlias = Any

T = TypeVar("T")

AbstractT = TypeVar("AbstractT")


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that saves itself, and loads itself in place."""

    async def save(self, directory: PathAwaitingCreation) -> Awaitable[None]:
        """Begin to save; see `CheckpointableHandler.save`."""
        ...

    async def load(self, directory: Path) -> Awaitable[None]:
        """Begin to load; see `CheckpointableHandler.load`."""
        ...


@runtime_checkable
class CheckpointableHandler(Protocol[T, AbstractT]):
    """Saves and loads one kind of object, each in its own directory.

    Any object with these methods is one. `save` and `load` run while the caller waits; the awaitable that
    they return is awaited in the background.
    """

    async def save(self, directory: PathAwaitingCreation, checkpointable: T) -> Awaitable[None]:
        """Copy what is needed from an object, which may change once this returns.

        Args:
            directory: Where to write. It may not exist yet: await its creation in the returned
                awaitable, not here.
            checkpointable: The object.

        Returns:
            An awaitable that writes it.
        """
        ...

    async def load(self, directory: Path, abstract_checkpointable: AbstractT | None = None) -> Awaitable[T]:
        """Begin to load what was saved in a directory, as requested; with None as it was saved.

        Returns:
            An awaitable of the object.
        """
        ...

    async def metadata(self, directory: Path) -> AbstractT:
        """Describe what was saved, in a form that `load` takes."""
        ...

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether `save` takes this object."""
        ...

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Return whether `load` takes this, which is not None; None if that depends on what was saved."""
        ...


def typestr(handler_cls: type[Any]) -> str:
    """Return the name that a checkpoint records of a handler; penstock's are recorded as Orbax's."""
    recorded: str | None = vars(handler_cls).get("RECORDED_AS")
    return recorded or f"{handler_cls.__module__}.{handler_cls.__qualname__}"


HandlerType: TypeAlias = type[Any]

RegistryEntry: TypeAlias = tuple[HandlerType, str | None]

HandlerT = TypeVar("HandlerT", bound=type[Any])


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
        """Return whether a handler was added for a name."""
        ...

    def get_all_entries(self) -> Sequence[RegistryEntry]:
        """Return all handlers, each with its name if it has one."""
        ...

    def get_secondary_typestrs(self, handler_type: HandlerType) -> Sequence[str]:
        """Return the other recorded names of a handler."""
        ...


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
            ValueError: If it is not a class.
            AlreadyExistsError: If the name has one; without a name, if the handler was added already.
        """
        given = cast("object", handler_type)
        if not isinstance(given, type):
            raise ValueError(f"The `handler_type` must be a type, but got {given}.")
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
class ReadOnlyCheckpointableHandlerRegistry(_Registry):
    """A copy of a registry, to which nothing can be added."""

    def __init__(self, registry: CheckpointableHandlerRegistry) -> None:
        super().__init__()
        self._entries.extend(registry.get_all_entries())
        for handler_type, _ in self._entries:
            self._typestrs[handler_type] = registry.get_secondary_typestrs(handler_type)

    def add(
        self,
        handler_type: HandlerType,
        *,
        checkpointable_name: str | None = None,
        secondary_typestrs: Sequence[str] | None = None,
    ) -> CheckpointableHandlerRegistry:
        raise NotImplementedError("Adding not implemented for read-only registry.")


_GLOBAL_REGISTRY: Final[CheckpointableHandlerRegistry] = _Registry()
"""`register_handler` adds to it: Orbax's API has a registry of the process."""


def global_registry() -> CheckpointableHandlerRegistry:
    """Return the registry of the process, which `register_handler` adds to."""
    return _GLOBAL_REGISTRY


def local_registry(
    other_registry: CheckpointableHandlerRegistry | None = None,
    *,
    include_global_registry: bool = True,
) -> CheckpointableHandlerRegistry:
    """Return a new registry, with the handlers of others.

    Args:
        other_registry: Whose handlers are added.
        include_global_registry: Whether the handlers of the process are added first.
    """
    registry: CheckpointableHandlerRegistry = _Registry()
    if include_global_registry:
        add_all(registry, _GLOBAL_REGISTRY)
    if other_registry is not None:
        add_all(registry, other_registry)

    return registry


def default_registry() -> CheckpointableHandlerRegistry:
    """Return the default of a context: a read-only copy of the handlers of the process."""
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
    _GLOBAL_REGISTRY.add(cls, checkpointable_name=checkpointable_name, secondary_typestrs=secondary_typestrs)
    return cls


def resolve_handler_for_save(
    registry: CheckpointableHandlerRegistry, checkpointable: Any, *, name: str
) -> Any:
    """Return a handler for an object.

    An object that saves itself comes first, then the handler registered for the name, then the last
    registered of those that can handle the object.

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
        f"(`CheckpointablesOptions`), whose `is_handleable` accepts it. There are: {_types(registry)}"
    )


def resolve_handler_for_load(
    registry: CheckpointableHandlerRegistry,
    abstract_checkpointable: Any,
    *,
    name: str,
    handler_typestr: str | None = None,
) -> Any:
    """Return a handler for what was saved under a name.

    Args:
        registry: The handlers.
        abstract_checkpointable: The target; None for what was saved.
        name: Of the item.
        handler_typestr: The recorded handler that saved it; None if none is recorded.

    Raises:
        NoEntryError: If no handler fits.
    """
    named = _make(name, registry.get(name)) if registry.has(name) else None
    saver = _by_typestr(registry, handler_typestr) if handler_typestr else None
    if handler_typestr and saver is None:
        kernel.get_logger().warning("load.handler_unknown", item=name, handler=handler_typestr)

    def fits(handler: Any) -> bool:
        return abstract_checkpointable is None or bool(
            handler.is_abstract_handleable(abstract_checkpointable)
        )

    stateful = isinstance(abstract_checkpointable, StatefulCheckpointable)
    for handler in (saver, named) if stateful else (named, saver):
        if handler is not None and fits(handler):
            return handler

    found = None if abstract_checkpointable is None else _last_fitting(registry, fits)
    if found is not None or named is not None:
        return found or named

    raise NoEntryError(
        f"No entry for checkpointable={name} in the registry, saved by {handler_typestr} and asked for as "
        f"{abstract_checkpointable!r}. There are: {_types(registry)}"
    )


def _by_typestr(registry: CheckpointableHandlerRegistry, recorded: str) -> Any:
    for handler_type, name in reversed(registry.get_all_entries()):
        if typestr(handler_type) == recorded or recorded in registry.get_secondary_typestrs(handler_type):
            return _make(name, handler_type)

    return None


def _last_fitting(registry: CheckpointableHandlerRegistry, fits: Callable[[Any], Any]) -> Any:
    """Return the last added handler that fits and is not for one name only."""
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


STATE: Final = "state"
"""The item that `save` makes."""

AUTO: Final = "AUTO"
"""Asks `load` to find the item that holds a tree."""

METRICS: Final = "metrics"

DELETION: Final = "_CHECKPOINT_DELETION"

RESERVED: Final = frozenset({METRICS, AUTO, DELETION})


def check_item_names(given: Any, what: str) -> None:
    """Refuse anything but a dict with names of items.

    Raises:
        ValueError: If it is refused.
    """
    if not isinstance(given, dict):
        raise ValueError(f"`{what}` must be a valid dict of names to objects, but got {type(given)}")

    check_names(cast("Any", given))


def check_one_name(name: str | None) -> None:
    """Refuse anything but the name of an item, None, or `AUTO`.

    Raises:
        ValueError: If it is refused.
    """
    if name is not None and name != AUTO:
        check_names((name,))


def check_names(names: Iterable[Any]) -> None:
    """Refuse a name that no item can have.

    Raises:
        ValueError: If it is refused.
    """
    names = list(names)
    if "" in names:
        raise ValueError("Empty string is not supported as a checkpointable name: it must not be empty.")

    reserved = RESERVED & set(names)
    if reserved:
        raise ValueError(f"Provided reserved checkpointable keys: {sorted(reserved)}.")

    for name in names:
        if not isinstance(name, str) or name in {".", ".."} or os.sep in name or "\0" in name:
            raise ValueError(f"a checkpointable cannot be called {name!r}: it is the name of its directory")


def handler_for_load(
    registry: CheckpointableHandlerRegistry, abstract: Any, *, name: str, recorded: str | None
) -> Any:
    """Resolve as `resolve_handler_for_load` does; an unknown item is taken for a tree.

    Raises:
        NoEntryError: If no handler fits, and there is none for trees.
    """
    try:
        return resolve_handler_for_load(registry, abstract, name=name, handler_typestr=recorded)
    except NoEntryError:
        if not registry.has(STATE):
            raise

        return registry.get(STATE)()
