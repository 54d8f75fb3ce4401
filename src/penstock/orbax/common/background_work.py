"""Waiting for TensorStore and for blocking calls, in handlers that are called directly."""

from __future__ import annotations

__all__ = ("all_results", "blaming", "in_thread", "reserved", "together")

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from anyio import create_task_group

from penstock.kernel.concurrency.threads import Threads, await_future
from penstock.kernel.pipeline.failures import forget_locals, without_frame
from penstock.orbax.common.leaf_args import ParamInfo

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function without blocking the event loop.

    Cancellation:
        Delivered once the function has returned.
    """
    return await Threads(1).run(function, *args)


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
                failures.append(without_frame(error))
                tasks.cancel_scope.cancel()
            except BaseException as cancellation:
                forget_locals(cancellation)  # task groups keep it in a reference cycle
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


async def all_results(futures: Sequence[Any], infos: Sequence[ParamInfo]) -> list[Any]:
    """Wait for one TensorStore future per leaf.

    Raises:
        Exception: The first error. The other futures are cancelled.
    """
    try:
        results: list[Any] = []
        for future, info in zip(futures, infos, strict=True):
            with blaming(info):
                results.append(future.result() if future.done() else await await_future(future))
    except BaseException:
        for future in futures:
            future.cancel()
        raise

    return results


@contextmanager
def blaming(info: ParamInfo) -> Generator[None]:
    """Add the name of the leaf to errors."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the leaf {info.name!r}")
        raise


@asynccontextmanager
async def reserved(limiter: Any, nbytes: int) -> AsyncGenerator[None]:
    """Hold bytes of a limiter, if there is one: an object with `wait_for_bytes` and `release_bytes`."""
    if limiter is None:
        yield
        return

    await limiter.wait_for_bytes(nbytes)
    try:
        yield
    finally:
        await limiter.release_bytes(nbytes)
