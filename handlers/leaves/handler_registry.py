"""Finds the handler of a leaf, by its Python type or by the type name found on disk."""

from __future__ import annotations

__all__ = ("HANDLERS", "HandlerRegistry")

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from threading import RLock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Final, Protocol, cast, final, runtime_checkable

from penstock.handlers.leaves.adapted_handler import AdaptedHandler
from penstock.kernel.errors import AmbiguousHandlerError, HandlerError, NoHandlerError
from penstock.kernel.protocols.capability import Capability
from penstock.kernel.protocols.leaf_handlers import LeafHandler, TypeHandler
from penstock.kernel.registry import PluginKind

_STREAMING = frozenset({"typestr", "describe", "pieces", "targets", "build"})
_BATCH = frozenset({"typestr", "serialize", "deserialize", "metadata", "memory_size", "finalize"})


@runtime_checkable
class MakesWorker(Capability, Protocol):
    """A handler of another library that supplies its own penstock handler."""

    def stage_worker(self) -> LeafHandler: ...


@final
@dataclass(frozen=True, slots=True)
class HandlerEntry:
    """A type and what handles it."""

    type_: type
    given: object  #: what was registered, before it was adapted
    handler: LeafHandler


def entry_of(type_: object, handler: object) -> HandlerEntry:
    """Check a type and a handler, and adapt the handler if it has the batch protocol only.

    Raises:
        HandlerError: If `issubclass` does not accept the type, or the handler is not one.
    """
    return HandlerEntry(_checked(type_), handler, _adapted(handler))


def type_name(type_: type) -> str:
    """Return a type's usual name: `int`, `numpy.ndarray`."""
    name = type_.__qualname__
    return name if type_.__module__ == "builtins" else f"{type_.__module__}.{name}"


def handler_name(handler: object) -> str:
    """Name a handler by its class, looking through the adapter."""
    return handler.name if isinstance(handler, AdaptedHandler) else type_name(type(handler))


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


def _entries(function: Callable[[], object]) -> list[HandlerEntry]:
    returned = function()
    if not isinstance(returned, Mapping):
        raise HandlerError(f"it returned {returned!r}, not a mapping from type to handler")

    return [entry_of(type_, handler) for type_, handler in cast("Mapping[object, object]", returned).items()]


HANDLERS: Final = PluginKind("handler", "penstock.handlers", HandlerError, _entries)


@dataclass(slots=True)
class _State:
    """All mutable state, guarded by the registry's lock."""

    explicit: dict[type, HandlerEntry] = field(default_factory=dict[type, HandlerEntry])
    plugged_in: dict[type, list[HandlerEntry]] = field(default_factory=dict[type, list[HandlerEntry]])
    to_load: bool = True
    cache: dict[type, LeafHandler] = field(default_factory=dict[type, LeafHandler])

    def copy(self) -> _State:
        plugged_in = {type_: list(entries) for type_, entries in self.plugged_in.items()}
        return _State(dict(self.explicit), plugged_in, self.to_load, dict(self.cache))

    def entries(self, type_: type) -> list[HandlerEntry]:
        """Return the entries for exactly this type; manual registrations outrank entry points."""
        return [self.explicit[type_]] if type_ in self.explicit else self.plugged_in.get(type_, [])

    def types(self) -> tuple[type, ...]:
        return tuple({**self.explicit, **self.plugged_in})


@final
class HandlerRegistry:
    """Handlers by leaf type. It is passed to a Checkpointer; there is no global registry.

    A type is handled by the handler registered for exactly this type; else for the first of its
    bases in method resolution order; else for an abstract base class that it is a subclass of, where the
    more specific one wins and a tie is an error. `object` comes last.

    Other distributions add handlers through the entry-point group `penstock.handlers`. Each entry
    point names a function without parameters that returns a mapping from type to handler::

        def handlers() -> dict[type, LeafHandler | TypeHandler]:
            return {QuantisedArray: QuantisedArrayHandler()}

    They are loaded by the first lookup without an exact match, and cannot replace a manual registration. If
    two of them claim one type, looking that type up is an error.

    Thread-safe.

    Args:
        entry_points: Whether to consult the entry points at all.
    """

    __slots__ = ("_lock", "_state")

    def __init__(self, *, entry_points: bool = True) -> None:
        self._lock = RLock()  # re-entrant, because the error of a lookup lists what is known
        self._state = _State(to_load=entry_points)

    def register(
        self,
        type_: type,
        handler: LeafHandler | TypeHandler | MakesWorker,
        *,
        override: bool = False,
    ) -> None:
        """Handle leaves of `type_`, and of its subclasses unless they have a handler of their own.

        Args:
            type_: A class, an abstract base class, or a `runtime_checkable` protocol of methods.
            handler: An instance. A handler that has only the batch protocol is adapted, unless it supplies a
                penstock handler itself.
            override: Replace the handler that is registered for this very type.

        Raises:
            HandlerError: If the type has a handler already, `handler` is not a handler, or `issubclass` does
                not accept `type_`.
        """
        entry = entry_of(type_, handler)
        with self._lock:
            before = self._state.explicit.get(type_)
            if before is not None and not override:
                raise HandlerError(
                    f"{type_name(type_)} is handled by {handler_name(before.given)} already; "
                    f"pass override=True to let {handler_name(handler)} replace it"
                )

            self._state.explicit[type_] = entry
            self._state.cache.clear()

    def lookup(self, type_: type, key_path: str) -> LeafHandler:
        """Find the handler for a leaf of this type.

        Args:
            type_: Its exact type.
            key_path: Of the leaf, for the error.

        Raises:
            NoHandlerError: If nothing fits.
            AmbiguousHandlerError: If two handlers fit equally well.
            HandlerError: If an entry point is broken; the message names its distribution.

        Blocking: The first lookup without an exact match imports the entry points. All others are a dict
            lookup, or a short search whose result is kept.
        """
        handler = self._state.cache.get(type_)
        if handler is not None:
            return handler

        with self._lock:
            if type_ not in self._state.explicit:
                self._load_entry_points()

            entries = self._fitting(type_)
            if not entries:
                raise NoHandlerError(
                    key_path,
                    type_name(type_),
                    self.known(),
                    is_function=_is_of_functions(type_),
                    is_dataclass=is_dataclass(type_),
                )

            handler = _the_only_one(type_name(type_), entries, key_path)
            self._state.cache[type_] = handler
            return handler

    def for_typestr(self, typestr: str, key_path: str) -> LeafHandler:
        """Find the handler that wrote a leaf, by the type name found on disk.

        If two handlers have this name, the one of the more general type is used: a handler for a subclass of
        `np.ndarray` may store it as `np.ndarray` without taking over all arrays.

        Raises:
            NoHandlerError: If no handler has this type name.
            AmbiguousHandlerError: If handlers of unrelated types do.
            HandlerError: If an entry point is broken; the message names its distribution.
        """
        with self._lock:
            entries = _named(typestr, self._state.explicit.values())
            if not entries:
                self._load_entry_points()
                plugged_in = [entry for group in self._state.plugged_in.values() for entry in group]
                entries = _named(typestr, plugged_in)

            if not entries:
                raise NoHandlerError(key_path, f"the stored type {typestr!r}", self.known_typestrs())

            types = _most(lambda a, b: issubclass(b, a), [entry.type_ for entry in entries])
            general = [entry for entry in entries if entry.type_ in types]
            return _the_only_one(f"the stored type {typestr!r}", general, key_path)

    def copy(self) -> HandlerRegistry:
        """Return an independent registry with the same handlers."""
        copied = HandlerRegistry()
        with self._lock:
            copied._state = self._state.copy()

        return copied

    def known(self) -> tuple[str, ...]:
        """Names of the types with a handler, sorted. Loads nothing."""
        with self._lock:
            return tuple(sorted(type_name(type_) for type_ in self._state.types()))

    def known_typestrs(self) -> tuple[str, ...]:
        """Type names, as stored on disk, that can be read; sorted. Loads nothing."""
        with self._lock:
            types = self._state.types()
            return tuple(sorted({entry.handler.typestr for t in types for entry in self._state.entries(t)}))

    def _fitting(self, type_: type) -> list[HandlerEntry]:
        for base in type_.__mro__:
            entries = [] if base is object else self._state.entries(base)
            if entries:
                return entries

        abstract = [base for base in self._state.types() if issubclass(type_, base)]
        return [entry for base in _most(issubclass, abstract) for entry in self._state.entries(base)]

    def _load_entry_points(self) -> None:
        if not self._state.to_load:
            return

        plugged_in: dict[type, list[HandlerEntry]] = {}
        for entries in HANDLERS.load_all():
            for entry in entries:
                plugged_in.setdefault(entry.type_, []).append(entry)

        self._state.plugged_in = plugged_in
        self._state.to_load = False  # only now, so that a broken entry point is reported each time


def _named(typestr: str, entries: Iterable[HandlerEntry]) -> list[HandlerEntry]:
    return [entry for entry in entries if entry.handler.typestr == typestr]


def _is_of_functions(type_: type) -> bool:
    """True if values of a type are functions: of Python, or made by jax, as `jnp.tanh` is."""
    if type_ in {FunctionType, BuiltinFunctionType, MethodType, partial}:
        return True

    return type_.__module__.partition(".")[0] in {"jax", "jaxlib", "numpy"} and "__call__" in dir(type_)


def _most(closer: Callable[[type, type], bool], types: list[type]) -> list[type]:
    """Keep the most specific types."""
    return [a for a in types if not any(closer(b, a) and not closer(a, b) for b in types)]


def _the_only_one(what: str, entries: list[HandlerEntry], key_path: str) -> LeafHandler:
    first = entries[0]
    for other in entries[1:]:
        if other.given is not first.given and other.given != first.given:
            error = AmbiguousHandlerError(what, handler_name(first.given), handler_name(other.given))
            error.key_path = key_path
            raise error

    return first.handler
