"""Where coroutines run for callers that do not await them: also for those inside a running event loop.

Nothing patches or re-enters a loop. Whoever calls a synchronous function waits in its own thread while
another thread's loop does the work.
"""

from __future__ import annotations

__all__ = ("LoopThread", "run_sync")

import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread
from typing import Any, Generic, TypeVar, final

import anyio
from anyio import Event, NoEventLoopError
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.lowlevel import current_token

from penstock.kernel.concurrency.threads import LoopHandle, await_future

T = TypeVar("T")
ResourceT = TypeVar("ResourceT")


def run_sync(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Call a coroutine function and wait for its result, in an event loop of its own.

    The loop runs in this thread, or in another one if this thread runs a loop already.
    """
    try:
        current_token()
    except NoEventLoopError:
        return anyio.run(partial(_call, function), *args)

    with start_blocking_portal() as portal:
        return portal.call(partial(_call, function), *args)


async def _call(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    return await function(*args)


@dataclass(frozen=True, slots=True)
class _Open(Generic[ResourceT]):
    resources: tuple[ResourceT, ...]
    portal: BlockingPortal
    stop: Callable[[], None]  #: from any thread; does not wait


@final
class LoopThread(Generic[ResourceT]):
    """Async resources in an event loop in a thread, which begins when they are first used.

    It ends with `close`, or when nobody refers to the object any more, and may begin again. Thread-safe.

    Args:
        make: Returns the resources, not yet entered. It must not refer to the object itself.
    """

    def __init__(self, make: Callable[[], Sequence[AbstractAsyncContextManager[ResourceT]]]) -> None:
        self._make = make
        self._lock = Lock()
        self._open: _Open[ResourceT] | None = None
        self._thread: Thread | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call `function(resources, *args)` in the loop and wait for its result.

        Raises:
            RuntimeError: If called in the loop itself, which would never end.
        """
        return self._submit(function, args).result()

    async def acall(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Do as `call`, without blocking the event loop of the caller.

        Cancellation:
            Cancels the call, and does not wait for it.
        """
        return await await_future(self._submit(function, args))

    def close(self) -> None:
        """Leave the resources and wait for the thread to end. Idempotent."""
        with self._lock:
            open_, thread, self._open, self._thread = self._open, self._thread, None, None
            finalizer, self._finalizer = self._finalizer, None

        if open_ is not None and thread is not None and finalizer is not None:
            finalizer.detach()
            open_.stop()
            thread.join()

    def _submit(self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> Future[T]:
        open_ = self._opened()
        return open_.portal.start_task_soon(partial(_call, function), open_.resources, *args)

    def _opened(self) -> _Open[ResourceT]:
        with self._lock:
            if self._open is None:
                opened: Future[_Open[ResourceT]] = Future()
                # A daemon: an idle loop must not keep the interpreter alive.
                thread = Thread(target=_run, args=(self._make, opened), name="penstock.orbax", daemon=True)
                thread.start()
                self._open, self._thread = opened.result(), thread
                self._finalizer = weakref.finalize(self, self._open.stop)

            return self._open


def _run(
    make: Callable[[], Sequence[AbstractAsyncContextManager[ResourceT]]], opened: Future[_Open[ResourceT]]
) -> None:
    async def serve() -> None:
        async with AsyncExitStack() as stack:
            resources = tuple([await stack.enter_async_context(resource) for resource in make()])
            portal = await stack.enter_async_context(BlockingPortal())
            stopping, loop = Event(), LoopHandle()
            opened.set_result(_Open(resources, portal, partial(loop.post, stopping.set)))
            await stopping.wait()

    try:
        anyio.run(serve)
    except BaseException as error:
        if opened.done():
            raise

        opened.set_exception(error)
