"""Blocking twins of coroutine functions, with the very parameters of the originals.

Type checkers see the parameters through a `ParamSpec`; `help` and `inspect.signature` see them because each
twin wraps its original. So no list of parameters is written twice.
"""

from __future__ import annotations

__all__ = ("blocking", "blocking_method", "parameters_of", "shown_as")

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from inspect import getdoc
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from penstock.blocking.portal import run_once
from penstock.kernel.pipeline.failures import forget_on_error, short_traceback

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])


def blocking(function: Callable[P, Awaitable[R]]) -> Callable[P, R]:
    """Return the twin of a coroutine function: it runs one call in its own event loop."""

    def call(*args: P.args, **keywords: P.kwargs) -> R:
        __tracebackhide__ = True
        calls = [partial(function, *args, **keywords)]
        del args, keywords  # a failure keeps nothing that the caller gave
        with forget_on_error():
            return run_once(calls.pop())

    return short_traceback(shown_as(function, call))


def blocking_method(method: Callable[Concatenate[Any, P], Awaitable[R]]) -> Callable[Concatenate[Any, P], R]:
    """Return the twin of a coroutine method, for a class with a `_portal` whose `_inner` is the original."""

    def call(self: Any, /, *args: P.args, **keywords: P.kwargs) -> R:
        __tracebackhide__ = True
        calls = [partial(method, self._inner, *args, **keywords)]
        del args, keywords  # a failure keeps nothing that the caller gave
        with forget_on_error():
            return cast("R", self._portal.call(calls.pop()))

    return shown_as(method, call)


def parameters_of(
    original: Callable[P, Any],
) -> Callable[[Callable[Concatenate[S, ...], None]], Callable[Concatenate[S, P], None]]:
    """Give an `__init__` the parameters of another class; it takes them as `**options` and passes them on."""

    def decorate(init: Callable[Concatenate[S, ...], None]) -> Callable[Concatenate[S, P], None]:
        return cast("Callable[Concatenate[S, P], None]", wraps(cast("Any", original).__init__)(init))

    return decorate


def shown_as(original: Callable[..., Any], twin: F) -> F:
    """Make `help` and `inspect.signature` show the parameters of `original` for its blocking `twin`."""
    own = twin.__doc__
    wraps(original)(twin)
    summary, _, rest = (getdoc(original) or "").partition("\n")
    twin.__doc__ = own or f"{summary}\n\nBlocks, and returns what awaiting the original returns.\n{rest}"
    return twin
