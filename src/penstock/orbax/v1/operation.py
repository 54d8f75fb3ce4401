"""A save or load that runs in its own event loop, and the handle on it."""

from __future__ import annotations

__all__ = ("AsyncResponse", "BackgroundOperation", "begin", "budget", "give_up", "share_loop", "wait_for")

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, final

import anyio
from anyio import CancelScope, create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup

from penstock import MemoryRegulator, kernel
from penstock.embedding import blocking, failures
from penstock.errors import PenstockError, RunningLoopError
from penstock.orbax.future import as_raised

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class AsyncResponse(Protocol[T_co]):
    """The response of the `_async` functions. Await it, or wait for it in a thread."""

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the end; return the result or raise the error.

        Args:
            timeout: The longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: If it is not done by then. It goes on.
        """
        ...

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the result once there is one; not if the operation fails."""
        ...

    def __await__(self) -> Generator[Any, Any, T_co]: ...


@failures.short_tracebacks
@final
class BackgroundOperation(Generic[T]):
    """The implementation of `AsyncResponse`. Awaited from asyncio and trio, any number of times."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begun: failures.FailureFuture[None] = failures.FailureFuture()
        self._done: failures.FailureFuture[T] = failures.FailureFuture()
        self._thread: int | None = None
        self._loop: blocking.LoopHandle | None = None
        self._scope: CancelScope | None = None

    def __repr__(self) -> str:
        return f"<{self.name} {'done' if self._done.done() else 'under way'}>"

    def __await__(self) -> Generator[Any, Any, T]:
        return self._wait().__await__()

    def result(self, timeout: float | None = None) -> T:
        """See `AsyncResponse`.

        Raises:
            RunningLoopError: If called in the loop that does the work.
        """
        self._check_thread()
        return self._done.result(timeout)

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """See `AsyncResponse`."""

        def call(done: Future[T]) -> None:
            if done.exception() is None:
                try:
                    callback(done.result())
                except Exception:
                    kernel.get_logger().exception("operation.callback_failed", operation=self.name)

        self._done.add_done_callback(call)

    def done(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return self._done.done()

    def cancel(self) -> None:
        """Ask it to stop and undo its work. From any thread; does not wait."""
        if self._loop is not None and self._scope is not None:
            self._loop.post(self._scope.cancel)

    def mark_begun(self) -> None:
        """Note that the part that the caller has to wait for is over."""
        with suppress(InvalidStateError):
            self._begun.set_result(None)

    def wait_begun(self) -> None:
        """Wait in a thread until then.

        Raises:
            Exception: What it failed with before.
        """
        self._check_thread()
        self._begun.result()

    async def begun(self) -> None:
        """Wait until then.

        Raises:
            Exception: What it failed with before.
        """
        await _of(self._begun)

    async def run(self, main: Main[T]) -> None:
        """Do the work. Errors go to those who wait; only cancellation is raised."""
        self._thread, self._loop = threading.get_ident(), blocking.LoopHandle()
        try:
            with CancelScope() as self._scope:
                value = await main(self)
                self.mark_begun()
                self._done.set_result(value)
        except Exception as error:
            self._fail(failures.without_frame(error))
        except BaseException as interrupt:
            self._fail(interrupt)
            raise

        if not self._done.done():
            self._fail(PenstockError(f"{self.name} was cancelled"))

    def fail(self, error: BaseException) -> None:
        """Give an error to all that wait."""
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        failure = failures.Failure(as_raised(error))
        for future in (self._begun, self._done):
            with suppress(InvalidStateError):
                future.set_failure(failure)

    def _check_thread(self) -> None:
        if self._thread == threading.get_ident() and not self._done.done():
            raise RunningLoopError(f"{self.name} runs in this event loop: await it")

    async def _wait(self) -> T:
        return await _of(self._done)


Main: TypeAlias = Callable[[BackgroundOperation[T]], Awaitable[T]]

_HOST: Final[ContextVar[tuple[int, TaskGroup] | None]] = ContextVar("penstock_orbax_host", default=None)
"""The loop of an operation, by its thread. What handlers start inside shares that loop."""

_PARTS: Final[ContextVar[int]] = ContextVar("penstock_orbax_parts", default=1)
"""The number of parts of an operation that share its memory."""


def budget(limit: int | None) -> int | None:
    """Return the share of one part in a memory limit, in bytes; None for penstock's default."""
    parts = _PARTS.get()
    if parts <= 1:
        return limit

    return max(1, (MemoryRegulator().limit if limit is None else limit) // parts)


def begin(name: str, main: Main[T]) -> BackgroundOperation[T]:
    """Start an operation, in its own loop or in that of the operation that it is a part of.

    Args:
        name: Shown in messages.
        main: Called with the operation; calls its `mark_begun`.
    """
    operation: BackgroundOperation[T] = BackgroundOperation(name)
    host = _HOST.get()
    if host is not None and host[0] == threading.get_ident():
        host[1].start_soon(operation.run, main)
        return operation

    # The caller may or may not run a loop; neither must run ours. The thread is not a daemon: a program
    # that ends waits for its saves.
    blocking.start_loop(operation.run, main, name=f"penstock: {name}")
    return operation


def wait_for(operation: BackgroundOperation[T]) -> T:
    """Wait in a thread for the end. If the wait is interrupted, stop the operation first."""
    try:
        return operation.result()
    except BaseException:
        if not operation.done():
            operation.cancel()
            with suppress(Exception):
                operation.result()

        raise


@asynccontextmanager
async def share_loop(parts: int = 1) -> AsyncGenerator[None, None]:
    """Let operations that are started inside share this loop. Waits for them; an error cancels them.

    Args:
        parts: How many there are; they share the memory.
    """
    failure: BaseException | None = None
    async with create_task_group() as tasks:
        token = _HOST.set((threading.get_ident(), tasks))
        parts_token = _PARTS.set(parts)
        try:
            yield
        except (get_cancelled_exc_class(), GeneratorExit):
            raise
        except BaseException as error:
            failure = error  # raised below, as it is and not in a group
            tasks.cancel_scope.cancel()
        finally:
            _HOST.reset(token)
            _PARTS.reset(parts_token)

    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # the traceback refers to this frame


def give_up(awaitables: Iterable[object]) -> None:
    """Close coroutines that will not be awaited."""
    for one in awaitables:
        if isinstance(one, Coroutine):
            one.close()


async def _of(future: Future[T]) -> T:
    """Wait for a future without a thread; being cancelled does nothing to it."""
    if not future.done():
        event, loop = anyio.Event(), blocking.LoopHandle()
        future.add_done_callback(lambda _: loop.post(event.set))
        await event.wait()

    return future.result()
