"""What a handler of the caller's raises arrives as it was raised, as in Orbax."""

from __future__ import annotations

__all__ = ("as_raised", "awaited_as_raised", "called_as_raised")

from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.kernel.errors import HandlerFailedError

T = TypeVar("T")


def as_raised(error: BaseException) -> BaseException:
    """Return the error of the handler in the place of the `HandlerFailedError` that it is the cause of.

    A note in it says which handler it was, and which leaf. Any other error is returned as it is.
    """
    cause = error.__cause__
    if not isinstance(error, HandlerFailedError) or not isinstance(cause, Exception):
        return error

    note = str(error)
    if note not in getattr(cause, "__notes__", ()):
        cause.add_note(note)

    return cause


def called_as_raised(function: Callable[..., T], *args: object) -> T:
    """Return what a function returns.

    Raises:
        Exception: What it raises, see `as_raised`.
    """
    try:
        return function(*args)
    except HandlerFailedError as error:
        raised = as_raised(error)

    # Outside of the except clause: the two would refer to each other.
    try:
        raise raised
    finally:
        del raised  # its traceback refers to this frame


async def awaited_as_raised(awaitable: Awaitable[T]) -> T:
    """Do the same with what is awaited."""
    try:
        return await awaitable
    except HandlerFailedError as error:
        raised = as_raised(error)

    try:
        raise raised
    finally:
        del raised
