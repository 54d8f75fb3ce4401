"""The arguments that handlers take, and which handler takes which."""

from __future__ import annotations

__all__ = (
    "CheckpointArgs",
    "construct_checkpoint_args",
    "get_registered_args_cls",
    "get_registered_handler_cls",
    "has_registered_args",
    "register_with_handler",
)

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from penstock.orbax.substitution.counterparts import Counterpart, loaded_orbax
from penstock.orbax.v0.common.handler_types import register_handler_type

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
    """
    if not for_save and not for_restore:
        raise ValueError("for_save and for_restore cannot both be False: the arguments are for nothing")

    def register(args_cls: ArgsT) -> ArgsT:
        if not issubclass(cast("type", args_cls), CheckpointArgs):
            raise TypeError(f"{args_cls} must subclass CheckpointArgs to be registered")

        handlers = dict(vars(args_cls).get(_HANDLERS, {}))
        handlers |= {use: handler_cls for use, wanted in _uses(for_save, for_restore) if wanted}
        setattr(args_cls, _HANDLERS, handlers)
        known: tuple[type, ...] = vars(handler_cls).get(_ARGS, ())
        if args_cls not in known:
            setattr(handler_cls, _ARGS, (*known, args_cls))

        register_handler_type(handler_cls)
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
    """Whether a handler has classes of arguments to save and to restore with."""
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


def _uses(for_save: bool, for_restore: bool) -> tuple[tuple[str, bool], ...]:
    return ("save", for_save), ("restore", for_restore)


def _args_for(handler_cls: type, use: str) -> type[CheckpointArgs]:
    known: tuple[type[CheckpointArgs], ...] = vars(handler_cls).get(_ARGS, ())
    for args_cls in known:
        handlers: dict[str, type[Any]] = vars(args_cls).get(_HANDLERS, {})
        if handlers.get(use) is handler_cls:
            return args_cls

    raise ValueError(f"Unable to find registered CheckpointArgs for {use} for {handler_cls}")
