"""Handlers and their arguments, registered for each other, and registries of handlers by item."""

from __future__ import annotations

__all__ = (
    "AlreadyExistsError",
    "CheckpointArgs",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "DefaultCheckpointHandlerRegistry",
    "NoEntryError",
    "create_default_handler_registry",
    "get_registered_args_cls",
    "get_registered_handler_cls",
    "has_registered_args",
    "register_with_handler",
)

import abc
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Final, Protocol, TypeAlias, TypeVar, cast

from penstock.embedding import blocking
from penstock.errors import HandlerError
from penstock.orbax.future import Future
from penstock.orbax.installation import Counterpart, WarnsOfOverrides, loaded_orbax


class CheckpointHandler(WarnsOfOverrides, Counterpart):
    """Saves and restores one kind of object. Use it through a `Checkpointer`, which makes saves atomic.

    Handlers that derive from Orbax's class of this name are such handlers, too.
    """

    _ORBAX_CLASS = ("", "CheckpointHandler")
    _ORBAX_NAME: ClassVar[str]  # of penstock's handlers: the name in `_CHECKPOINT_METADATA`
    _DURABLE: ClassVar[bool]  # of penstock's handlers: whether `save` syncs all that it writes
    _SAVES_TOGETHER: ClassVar[bool]  # likewise: whether several processes save one tree by it
    _BLOCKS: ClassVar[bool]  # likewise: whether `async_save` waits by blocking where no event loop runs

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write an object into a directory that exists; return when it is written."""

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the object that was written into a directory."""

    def metadata(self, directory: Any) -> Any | None:
        """Describe what was written into a directory without reading all of it. None by default."""
        return None

    def finalize(self, directory: Any) -> None:
        """Complete what was written, once, before it becomes visible. Does nothing by default."""

    def close(self) -> None:
        """Release the handler's resources. Does nothing by default."""

    @classmethod
    def typestr(cls) -> str:
        """The recorded name of the handler. Handlers that Orbax has, too, are recorded under its names."""
        return str(vars(cls).get("_ORBAX_NAME") or f"{cls.__module__}.{cls.__qualname__}")


class AsyncCheckpointHandler(CheckpointHandler):
    """A handler that returns once an object is copied, and writes it in the background."""

    _ORBAX_CLASS = ("", "AsyncCheckpointHandler")

    @abc.abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Sequence[Future] | None:
        """Copy an object and begin to write it.

        Returns:
            Futures of work that is already running; when all are done, the object is written.
        """


class DeferredPathAsyncCheckpointHandler(AsyncCheckpointHandler):
    """A handler whose `async_save` also takes a directory still being created: a `PathAwaitingCreation`."""


def is_durable(handler: object) -> bool:
    """Return whether a handler syncs what it writes. Files of other handlers are synced for them."""
    return bool(vars(type(handler)).get("_DURABLE", False))


def saves_together(handler: object) -> bool:
    """Return whether a handler takes a `JointDirectory`, to save a whole checkpoint together with others."""
    return bool(vars(type(handler)).get("_SAVES_TOGETHER", False))


def blocks_without_loop(handler: object) -> bool:
    """Return whether `async_save` of a handler runs without an event loop; that of others needs one."""
    return bool(vars(type(handler)).get("_BLOCKS", False))


def wait_for_all(handler: Any, directory: Any, *args: Any, **kwargs: Any) -> None:
    """Save synchronously with a handler's `async_save`. Also inside a running event loop."""

    async def start() -> Sequence[Future]:
        return await handler.async_save(directory, *args, **kwargs) or ()

    for future in blocking.run_sync(start):
        future.result()


ArgsT = TypeVar("ArgsT", bound="type[CheckpointArgs]")

_HANDLERS = "_penstock_handlers"  # of an args class: the handler it is for, by "save" and "restore"
_ARGS = "_penstock_args"  # of a handler class: the args classes registered with it, in order


@dataclass
class CheckpointArgs(Counterpart):
    """Base class of the arguments of one save or restore.

    A handler has one subclass for each, registered with `register_with_handler`. Arguments that derive from
    Orbax's class of this name are accepted, too, with the handlers that are registered with Orbax.
    """

    _ORBAX_CLASS = ("args", "CheckpointArgs")


def register_with_handler(
    handler_cls: type[Any], for_save: bool = False, for_restore: bool = False
) -> Callable[[ArgsT], ArgsT]:
    """Decorate a class of arguments that `handler_cls` takes.

    If a class is registered twice, it belongs to the later handler.

    Args:
        handler_cls: The handler.
        for_save: Whether they are for saving.
        for_restore: Whether they are for restoring.

    Raises:
        ValueError: If they are for neither.
        TypeError: If the decorated class is not a subclass of `CheckpointArgs`.
        AlreadyExistsError: If another handler is recorded under the same name. It is a ValueError.
    """
    if not for_save and not for_restore:
        raise ValueError("for_save and for_restore cannot both be False: the arguments are for nothing")

    def register(args_cls: ArgsT) -> ArgsT:
        if not issubclass(cast("type", args_cls), CheckpointArgs):
            raise TypeError(f"{args_cls} must subclass CheckpointArgs to be registered")

        _refuse_namesake(handler_cls)

        handlers = dict(vars(args_cls).get(_HANDLERS, {}))
        uses = {"save": for_save, "restore": for_restore}
        handlers |= {use: handler_cls for use, wanted in uses.items() if wanted}
        setattr(args_cls, _HANDLERS, handlers)
        known: tuple[type, ...] = vars(handler_cls).get(_ARGS, ())
        if args_cls not in known:
            setattr(handler_cls, _ARGS, (*known, args_cls))

        return args_cls

    return register


def get_registered_handler_cls(arg: type[CheckpointArgs] | CheckpointArgs) -> type[Any]:
    """Return the handler that takes arguments of a class.

    Raises:
        TypeError: If they are not `CheckpointArgs`.
        ValueError: If that class itself is not registered. Base classes do not count.
    """
    args_cls = arg if isinstance(arg, type) else type(arg)
    if not issubclass(cast("type", args_cls), CheckpointArgs):
        raise TypeError(f"{args_cls} must be a subclass of CheckpointArgs")

    handlers: dict[str, type[Any]] = vars(args_cls).get(_HANDLERS, {})
    handler: type[Any] | None = handlers.get("save") or handlers.get("restore")
    theirs = _orbax_registrations()
    if handler is None and theirs is not None and issubclass(args_cls, theirs.CheckpointArgs):
        return cast("type[Any]", theirs.get_registered_handler_cls(args_cls))
    if handler is None:
        raise ValueError(
            f"Unable to find registered CheckpointHandler for {args_cls}; use register_with_handler"
        )

    return handler


def get_registered_args_cls(handler: Any) -> tuple[type[CheckpointArgs], type[CheckpointArgs]]:
    """Return the classes of arguments that a handler takes to save and to restore.

    Args:
        handler: A handler or its class. Registrations of its base classes do not count.

    Raises:
        ValueError: If either is not registered.
    """
    handler_cls = handler if isinstance(handler, type) else type(handler)
    theirs = _orbax_registrations()
    if theirs is not None and not vars(handler_cls).get(_ARGS) and theirs.has_registered_args(handler_cls):
        found: tuple[type[CheckpointArgs], type[CheckpointArgs]] = theirs.get_registered_args_cls(handler_cls)
        return found

    return _args_for(handler_cls, "save"), _args_for(handler_cls, "restore")


def has_registered_args(handler: Any) -> bool:
    """Return whether a handler has classes of arguments to save and to restore with."""
    try:
        get_registered_args_cls(handler)
    except ValueError:
        return False

    return True


def construct_checkpoint_args(handler: Any, for_save: bool, *args: Any, **kwargs: Any) -> CheckpointArgs:
    """Return the `CheckpointArgs` among the arguments of a call, or construct them from all arguments.

    Raises:
        ValueError: If there are none, and no class is registered with the handler.
        TypeError: If they cannot be constructed from the arguments.
    """
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, CheckpointArgs):
            return arg

    save_cls, restore_cls = get_registered_args_cls(handler)
    make = cast("Callable[..., CheckpointArgs]", save_cls if for_save else restore_cls)
    return make(*args, **kwargs)


def _orbax_registrations() -> Any | None:
    """Orbax's module of the same functions, if the program has it: libraries register with that."""
    return loaded_orbax("checkpoint_args")


def _args_for(handler_cls: type, use: str) -> type[CheckpointArgs]:
    known: tuple[type[CheckpointArgs], ...] = vars(handler_cls).get(_ARGS, ())
    for args_cls in known:
        handlers: dict[str, type[Any]] = vars(args_cls).get(_HANDLERS, {})
        if handlers.get(use) is handler_cls:
            return args_cls

    raise ValueError(f"Unable to find registered CheckpointArgs for {use} for {handler_cls}")


_OWN_HANDLERS: Final = "penstock.orbax.handlers"
_OURS: Final = "penstock.orbax."
_V0: Final = ("orbax.checkpoint.v0._src.", "orbax.checkpoint._src.")
_EARLIER: Final = {
    "penstock.orbax.handlers.base_pytree.BasePyTreeCheckpointHandler": (
        "orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler.BasePyTreeCheckpointHandler"
    ),
}
"""A name that earlier versions of penstock recorded -> the one that is recorded now."""


def get_handler_type(handler_typestr: str) -> type[Any]:
    """Return the handler class with a recorded name whose arguments are registered.

    Raises:
        KeyError: If there is none.
    """
    import_module(_OWN_HANDLERS)  # the program may have used no name of the module that registers the class
    sources: list[Any] = [(CheckpointArgs, get_registered_handler_cls)]
    theirs, text = _orbax_registrations(), str(handler_typestr)
    if theirs is not None:
        sources.append((theirs.CheckpointArgs, theirs.get_registered_handler_cls))
    for name in (text, text.replace(*_V0, 1), _EARLIER.get(text)):
        for base, handler_of in sources:
            found = _registered(base, handler_of, name)
            if found is not None:
                return found

    raise KeyError(f'Handler type string "{handler_typestr}" not found in the registry.')


def _registered(
    base: type[Any], handler_of: Callable[[type[Any]], type[Any]], typestr: str | None
) -> type[Any] | None:
    """Return the handler of this name among those of all classes of arguments; of several the last."""
    found: type[Any] | None = None
    ahead: list[type[Any]] = base.__subclasses__()
    while ahead:
        args_cls = ahead.pop(0)
        with suppress(ValueError):  # of no handler
            handler_type = handler_of(args_cls)
            if _typestr(handler_type) == typestr:
                found = handler_type
        ahead.extend(args_cls.__subclasses__())

    return found


def _refuse_namesake(handler_cls: type[Any]) -> None:
    """Refuse a handler with the recorded name of another one: a restore would take either for the other.

    A class that was made again, as by a cell of a notebook, takes the place of the first.
    """
    if handler_cls.__module__.startswith(_OURS):  # their names differ, and there are many of them
        return

    name = _typestr(handler_cls)
    known = _registered(CheckpointArgs, get_registered_handler_cls, name)
    if known is not None and _qualified(known) != _qualified(handler_cls):
        raise AlreadyExistsError(
            f"Handler type string {name!r} already exists in the registry with type {known}. Cannot add type "
            f"{handler_cls}: what either saves is recorded under that name, which its `typestr` returns"
        )


def _typestr(handler_type: type[Any]) -> str:
    typestr = getattr(handler_type, "typestr", None)
    return _qualified(handler_type) if typestr is None else str(typestr())


def _qualified(class_: type[Any]) -> str:
    return f"{class_.__module__}.{class_.__qualname__}"


ArgsOrType: TypeAlias = "type[CheckpointArgs] | CheckpointArgs"
HandlerRegistryMapping: TypeAlias = "MutableMapping[tuple[str | None, type[CheckpointArgs]], Any]"


class AlreadyExistsError(HandlerError, ValueError):
    """A registry has this handler, or one for this item, already."""


class NoEntryError(HandlerError, KeyError):
    """No handler of a registry fits."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


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
            item: Its name; None for every item that has no entry.
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
