"""Several async calls at the same time, whose results or first failure one caller gets."""

from __future__ import annotations

__all__ = ("together",)

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from anyio import create_task_group
from anyio.lowlevel import checkpoint_if_cancelled

from penstock.kernel.errors import PipelineError
from penstock.kernel.pipeline.failures import forget_locals, without_frame

T = TypeVar("T")


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
