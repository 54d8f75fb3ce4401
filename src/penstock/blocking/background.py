"""Threads of their own, for work that belongs to no pipeline, and event loops for callers that have none.

Every thread and every event loop that penstock starts for a blocking caller begins here. No running
loop is ever patched or re-entered: a blocking caller waits while the loop of another thread works.
"""

from __future__ import annotations

__all__ = (
    "BackgroundCall",
    "Worker",
    "run_sync",
    "start_loop",
    "start_thread",
    "with_variables_of",
)

from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import partial
from threading import Thread
from typing import Any, TypeVar, final

import anyio

from penstock.kernel.concurrency.threads import in_event_loop, mark_own_loop, start
from penstock.kernel.errors import NoThreadError
from penstock.kernel.pipeline.failures import FailureFuture, ResultBox, without_frame

T = TypeVar("T")


@final
class BackgroundCall(FailureFuture[T]):
    """A call that runs in its own thread, which ends when the call returns."""

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...], name: str, daemon: bool) -> None:
        super().__init__()
        self._thread = Thread(target=_settle, args=(self, function, args), name=name, daemon=daemon)
        start(self._thread)

    def join(self) -> T:
        """Wait until the thread has ended; return or raise what the call did."""
        self._thread.join()
        return self.result()


@final
class Worker:
    """Calls functions in the background, one after another, in a thread that stays for the next ones.

    A thread that begins makes its caller wait until it runs, which may be long where processors are busy. The
    interpreter does not end before the calls do; a worker that is collected ends its thread.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(1, name)

    def __deepcopy__(self, memo: object) -> Worker:
        """Return another one, not started."""
        return Worker(self._name)

    def call(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Have a blocking function called once those before it are; return what becomes of it.

        Raises:
            NoThreadError: If there can be no thread.
        """
        outcome: FailureFuture[T] = FailureFuture()
        try:
            self._executor.submit(_settle, outcome, function, args)
        except RuntimeError as refusal:
            raise NoThreadError(str(refusal)) from refusal

        return outcome

    def close(self) -> None:
        """Wait for all calls, and end the thread. Using it again begins another one."""
        executor, self._executor = self._executor, ThreadPoolExecutor(1, self._name)
        executor.shutdown()


def start_thread(
    function: Callable[..., T], *args: Any, name: str = "penstock", daemon: bool = False
) -> BackgroundCall[T]:
    """Call a blocking function in its own thread.

    Args:
        function: What to call.
        *args: For the function.
        name: Of the thread.
        daemon: Whether the interpreter may end before the call does. By default it waits.
    """
    return BackgroundCall(function, args, name, daemon)


def start_loop(
    function: Callable[..., Awaitable[T]], *args: Any, name: str = "penstock", daemon: bool = False
) -> BackgroundCall[T]:
    """Await `function(*args)` in its own event loop, in its own thread.

    The function sees the context variables of the caller.
    """
    return start_thread(_run, function, args, copy_context(), name=name, daemon=daemon)


def run_sync(function: Callable[..., Awaitable[T]], *args: Any, needs_loop: bool = True) -> T:
    """Call a coroutine function and wait for its result, in its own event loop.

    The loop runs in this thread, or in another one if a loop is running here already. The function sees
    the context variables of the caller.

    Args:
        function: Is called in the loop.
        *args: For the function.
        needs_loop: Whether it waits for anything but `LoopThread.acall` and `Threads.run_briefly`. To begin
            and end a loop takes longer than to stage a small tree; without one these block.
    """
    if in_event_loop():
        return start_loop(function, *args, name="penstock: blocking call").join()

    box = ResultBox(partial(function, *args))
    del function, args  # a failure keeps nothing that the caller gave
    if needs_loop:
        anyio.run(_in_own_loop, box.run)
    else:
        _run_through(box.run())

    return box.take()


def _run_through(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits for an event loop."""
    try:
        work.send(None)
    except StopIteration:
        return

    work.close()
    raise RuntimeError("what was to run without an event loop waits for one")


def _run(function: Callable[..., Awaitable[T]], args: tuple[Any, ...], caller: Context) -> T:
    box = ResultBox(partial(function, *args))
    del function, args  # a failure keeps nothing that the caller gave
    anyio.run(with_variables_of, caller, partial(_in_own_loop, box.run))
    return box.take()


async def _in_own_loop(call: Callable[[], Awaitable[None]]) -> None:
    mark_own_loop()
    await call()


async def with_variables_of(caller: Context, call: Callable[[], Awaitable[T]]) -> T:
    """Await a call that sees the context variables of its caller, in another loop than the caller's."""
    own = copy_context()
    for variable, value in caller.items():
        if variable not in own:  # those that say which loop runs here are not the caller's
            variable.set(value)

    return await call()


def _settle(outcome: Future[T], function: Callable[..., T], args: tuple[Any, ...]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(function(*args))
    except BaseException as error:
        outcome.set_exception(without_frame(error))
    finally:
        del outcome, function, args  # the traceback refers to this frame
