"""Several calls at the same time, whose results or first failure one caller gets."""

from __future__ import annotations

__all__ = ("MANY", "at_once", "together")

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from anyio import NoEventLoopError, create_task_group, from_thread
from anyio.lowlevel import checkpoint_if_cancelled

from penstock.kernel.concurrency.threads import Threads, end_if_cancelled
from penstock.kernel.errors import PipelineError
from penstock.kernel.pipeline.failures import forget_locals, without_frame

A = TypeVar("A")
T = TypeVar("T")

MANY: Final = 32
"""So many calls are worth several threads. They take a millisecond to start."""


async def together(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run async functions concurrently; return their results in the same order.

    Raises:
        Exception: The first error, as it is and in no group. The other calls are cancelled.
        PipelineError: If what a call awaited was cancelled, and the call was not.
    """
    if len(calls) < 2:
        return [await call() for call in calls]

    results: dict[int, T] = {}
    failures: list[Exception] = []
    async with create_task_group() as tasks:

        async def run(at: int, call: Callable[[], Awaitable[T]]) -> None:
            try:
                results[at] = await call()
            except Exception as error:
                failures.append(without_frame(error))
                tasks.cancel_scope.cancel()
            except BaseException as cancellation:
                forget_locals(cancellation)  # task groups keep it in a reference cycle
                raise
            finally:
                del call

        for at, call in enumerate(calls):
            tasks.start_soon(run, at, call)

    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # the traceback refers to this frame

    # A task group treats a cancellation that it did not request as the quiet end of a task.
    if len(results) < len(calls):
        await checkpoint_if_cancelled()  # a cancellation of our own may not have been delivered here yet
        raise PipelineError("a call ended early: something that it awaited was cancelled")

    return [results[at] for at in range(len(calls))]


def at_once(call: Callable[[A], T], arguments: Sequence[A], threads: Threads | None = None) -> list[T]:
    """Call a function of each argument, in several threads; return the results in order. Blocking.

    For many calls that wait for a medium: requests to a bucket, files made durable one by one. The caller is
    in a worker thread, which waits meanwhile. In any other thread, and for few arguments, one call follows
    another.

    Args:
        call: Blocks.
        arguments: One for each call.
        threads: Of which none waits for another one, as the caller's does; by default eight.

    Raises:
        Exception: The first error. No further call begins then.

    Cancellation:
        No further call begins.
    """
    if len(arguments) < MANY:
        return [call(argument) for argument in arguments]
    try:
        from_thread.check_cancelled()
    except NoEventLoopError:  # this is no thread of an event loop
        return [call(argument) for argument in arguments]

    chosen = Threads() if threads is None else threads
    results: dict[int, T] = {}
    failed: list[BaseException] = []

    def share(first: int) -> None:
        for at in range(first, len(arguments), chosen.limit):
            if failed:
                return
            try:
                end_if_cancelled()
                results[at] = call(arguments[at])
            except BaseException as error:
                failed.append(error)
                raise

    async def shares() -> None:
        await together([partial(chosen.run, share, first) for first in range(chosen.limit)])

    try:
        from_thread.run(shares)
    finally:
        failed.clear()  # an error's traceback refers to these frames

    return [results[at] for at in range(len(arguments))]
