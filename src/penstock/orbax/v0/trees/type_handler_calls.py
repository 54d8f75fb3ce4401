"""Which type handlers serve one save or restore: those of the registry, with the arguments of that call."""

from __future__ import annotations

__all__ = ("CallRegistry", "as_stored", "serving")

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final, cast, final

from penstock.kernel.plugins.handler_registry import HandlerRegistry

_SERVING: Final[ContextVar[HandlerRegistry]] = ContextVar("penstock.orbax.serving")


@contextmanager
def serving(registry: HandlerRegistry) -> Generator[None]:
    """Let `registry` serve what is begun meanwhile, in this task and those that it begins."""
    token = _SERVING.set(registry)
    try:
        yield
    finally:
        _SERVING.reset(token)


@final
class CallRegistry:
    """What a Checkpointer asks that serves many calls: each is answered by the registry that serves it."""

    def lookup(self, type_: type, key_path: str) -> Any:
        """Find the handler of a type, or of what a class of `as_stored` stands for."""
        typestr = getattr(type_, _TYPESTR, None)
        if typestr is not None:
            return _SERVING.get().for_typestr(typestr, key_path)

        return _SERVING.get().lookup(type_, key_path)

    def for_typestr(self, typestr: str, key_path: str) -> Any:
        """Find the handler that wrote a leaf."""
        return _SERVING.get().for_typestr(typestr, key_path)

    def as_kernel(self) -> HandlerRegistry:
        """Return itself, as what a Checkpointer takes: nothing else is asked of it."""
        return cast("HandlerRegistry", self)


@lru_cache(maxsize=64)
def as_stored(typestr: str) -> type:
    """Return a class that stands in a target for a leaf that is restored by who wrote it."""
    return type(f"as stored: {typestr}", (), {_TYPESTR: typestr})


_TYPESTR: Final = "_penstock_stored_typestr"
