"""Calls that block and calls that run together, for handlers; and the errors that handlers raise."""

from __future__ import annotations

__all__ = (
    "as_raised",
    "awaited_as_raised",
    "called_as_raised",
    "in_thread",
    "together",
)

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from anyio import create_task_group

from penstock.embedding import failures as kept_failures
from penstock.embedding import kernel
from penstock.errors import HandlerFailedError, StageFailedError

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function without blocking the event loop.

    Cancellation:
        Delivered once the function has returned.
    """
    return await kernel.Threads(1).run(function, *args)


async def together(functions: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run async functions concurrently; return their results in the same order.

    Raises:
        Exception: The first error, as it is. The other functions are cancelled.
    """
    if len(functions) == 1:
        return [await functions[0]()]

    results: dict[int, T] = {}
    failures: list[Exception] = []
    async with create_task_group() as tasks:

        async def call(at: int, function: Callable[[], Awaitable[T]]) -> None:
            try:
                results[at] = await function()
            except Exception as error:
                failures.append(kept_failures.without_frame(error))
                tasks.cancel_scope.cancel()
            except BaseException as cancellation:
                kept_failures.forget_locals(cancellation)  # task groups keep it in a reference cycle
                raise
            finally:
                del function

        for at, function in enumerate(functions):
            tasks.start_soon(call, at, function)

    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # the traceback refers to this frame

    return [results[at] for at in range(len(functions))]


def as_raised(error: BaseException) -> BaseException:
    """Return the error of the handler in the place of the one that it is the cause of.

    A note in it says which handler it was, and which leaf. Any other error is returned as it is.
    """
    cause = error.__cause__
    if not isinstance(error, HandlerFailedError | StageFailedError) or not isinstance(cause, Exception):
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
