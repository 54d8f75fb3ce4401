"""A single worker thread, for calls that must all be made from the same thread."""

from __future__ import annotations

__all__ = (
    "OneThread",
    "one_thread",
)

from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, final

from anyio import CancelScope, Event, create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup

from penstock.kernel.concurrency.threads import LoopHandle, Threads, await_future

T = TypeVar("T")


@asynccontextmanager
async def one_thread(at_end: Callable[[], object] | None = None) -> AsyncGenerator[OneThread]:
    """Yield an object that calls functions one by one in a single worker thread, which ends with the block.

    The allocator keeps freed memory in a pool per thread. If many threads allocate in turn, it keeps that
    memory once per thread.

    Args:
        at_end: Called by the thread when it ends, for example to have the allocator return freed memory.

    Cancellation:
        Returns when the current call has ended.
    """
    async with create_task_group() as tasks:
        calls = OneThread(tasks, at_end)
        try:
            yield calls
        finally:
            calls.close()


@final
class OneThread:
    """Makes calls in order of request, in a thread that starts with the first call."""

    __slots__ = ("_at_end", "_begun", "_calls", "_tasks")

    def __init__(self, tasks: TaskGroup, at_end: Callable[[], object] | None) -> None:
        self._at_end = at_end
        self._tasks = tasks
        self._begun = False
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` in the thread.

        Cancellation:
            As `Threads.run`: a call that has begun is not interrupted, and is waited for.
        """
        if not self._begun:
            self._begun = True
            self._tasks.start_soon(Threads(1).run, self._serve, name="penstock thread")

        outcome: Future[T] = Future()
        self._calls.put(partial(_settle, outcome, function, args))
        try:
            return await await_future(outcome)  # cancels a call that has not begun
        except BaseException:
            await _over(outcome)
            raise
        finally:
            del outcome, args  # the traceback refers to this frame

    def close(self) -> None:
        """End the thread once it has made all requested calls."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # the result belongs to the caller now

        if self._at_end is not None:
            self._at_end()


def _settle(outcome: Future[T], function: Callable[..., T], args: tuple[Any, ...]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(function(*args))
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        del outcome, function, args  # the traceback refers to this frame


async def _over(outcome: Future[Any]) -> None:
    over, loop = Event(), LoopHandle()
    outcome.add_done_callback(lambda _: loop.post(over.set))
    with CancelScope(shield=True):
        while not over.is_set():
            with suppress(get_cancelled_exc_class()):  # asyncio's own goes through every shield
                await over.wait()
