"""An async resource that is held open by an event loop in a thread, for callers in other threads."""

from __future__ import annotations

__all__ = ("LoopThread",)

import sys
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, get_ident
from types import TracebackType
from typing import Any, Generic, TypeVar, final

import anyio
from anyio import CancelScope, Event, create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup

from penstock.blocking.background import BackgroundCall, start_thread, with_variables_of
from penstock.kernel.concurrency.threads import LoopHandle, await_future, in_event_loop, mark_own_loop
from penstock.kernel.pipeline.failures import ResultBox

T = TypeVar("T")
ResourceT = TypeVar("ResourceT")


@final
@dataclass(slots=True)
class _Calls:
    """Calls on their way into the loop of a thread, each begun there as a task. Thread-safe.

    `BlockingPortal` would have each caller wait twice: for its task to begin, and for its end.
    """

    tasks: TaskGroup
    loop: LoopHandle
    own: Context  #: of the loop
    _ahead: list[_Call] = field(default_factory=list["_Call"])
    _lock: Lock = field(default_factory=Lock)
    _thread: int = field(default_factory=get_ident)
    _has_ended: bool = False

    def begin(self, call: _Call) -> None:
        """Have the loop make a call; return at once.

        Raises:
            RuntimeError: In that very loop, where waiting would never end, and after the last call.
        """
        if get_ident() == self._thread:
            raise RuntimeError("a call from the thread of this loop, which would wait for itself")

        with self._lock:
            if self._has_ended:
                raise RuntimeError("the loop of this thread has ended")

            self._ahead.append(call)

        self.loop.post(self._start_all)

    def _start_all(self) -> None:
        with self._lock:
            ahead = tuple(self._ahead)  # all: an interrupt may leave a call here without its post
            self._ahead.clear()

        for call in ahead:
            self.own.copy().run(self.tasks.start_soon, call, self.loop)

    def end(self) -> None:
        """Take no call any more, and fail those that have not begun. Idempotent."""
        with self._lock:
            self._has_ended = True
            left = tuple(self._ahead)
            self._ahead.clear()

        for call in left:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(RuntimeError("the loop of this thread has ended"))


@final
class _Call:
    """The call of `run()` as a task, which sees the context variables of the caller."""

    def __init__(self, run: Callable[[], Awaitable[None]]) -> None:
        self._run = run
        self._caller = copy_context()
        self.future: Future[None] = Future()  #: of the end; to cancel it cancels the call

    async def __call__(self, loop: LoopHandle) -> None:
        with CancelScope() as scope:

            def give_up(future: Future[None]) -> None:
                if future.cancelled():
                    loop.post(scope.cancel)

            self.future.add_done_callback(give_up)
            try:
                await with_variables_of(self._caller, self._run)
            except get_cancelled_exc_class():
                self.future.cancel()
                self.future.set_running_or_notify_cancel()
                raise
            except BaseException as interrupt:
                if self.future.set_running_or_notify_cancel():
                    self.future.set_exception(interrupt)
                raise

            if self.future.set_running_or_notify_cancel():
                self.future.set_result(None)


@final
@dataclass(slots=True)
class _Open(Generic[ResourceT]):
    """The state that the thread holds while it runs."""

    resource: ResourceT
    calls: _Calls
    stopping: Event
    loop: LoopHandle
    scope: CancelScope
    failure: Any = field(default=(None, None, None))  #: what the resource is left with

    def stop(self) -> None:
        """Have the thread leave the resource and end. From any thread; does not wait."""
        self.loop.post(self.stopping.set)

    def cancel(self) -> None:
        """Have the thread end without leaving the resource in peace. From any thread; does not wait."""
        self.loop.post(self.scope.cancel)


@final
class LoopThread(Generic[ResourceT]):
    """Holds an async context manager open in the event loop of a thread.

    The thread starts at the first call, or when this is entered. It ends with `close`, or when the
    object is collected, and may start again. It is a daemon: an idle loop does not keep the interpreter
    alive. Thread-safe.

    Args:
        make: Returns the context manager, not yet entered. It must not refer to this object.
        name: Of the thread.
    """

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[ResourceT]], name: str = "penstock"
    ) -> None:
        self._make = make
        self._name = name
        self._lock = Lock()
        self._open: _Open[ResourceT] | None = None
        self._thread: BackgroundCall[bool | None] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __deepcopy__(self, memo: object) -> LoopThread[ResourceT]:
        """Return another one, not started, whose resource is made likewise."""
        return LoopThread(self._make, self._name)

    def __enter__(self) -> LoopThread[ResourceT]:
        self._opened()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return self.close(exc_type, exc_val, exc_tb)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call `function(resource, *args)` in the loop and wait for its result.

        An interrupt, as by Ctrl-C, cancels the call and does not wait for it.

        Raises:
            RuntimeError: If called in that very loop, where waiting would never end.
        """
        calls, call, box = self._prepare(function, args)
        del args
        _wait(calls, call)
        return box.take()

    async def acall(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Do what `call` does, without blocking the event loop of the caller, if there is one.

        Cancellation:
            Cancels the call and does not wait for it; so does an interrupt where no loop runs.
        """
        calls, call, box = self._prepare(function, args)
        del args
        if in_event_loop():
            calls.begin(call)
            await await_future(call.future)
        else:
            _wait(calls, call)

        return box.take()

    def close(self, *failure: Any) -> bool | None:
        """Leave the resource and wait until the thread has ended. Idempotent.

        Args:
            *failure: What `__aexit__` of the resource gets, as its three arguments; by default no error.

        Returns:
            What `__aexit__` returned.
        """
        open_, thread = self._forget()
        if open_ is None or thread is None:
            return None

        open_.failure = failure or open_.failure
        open_.stop()
        try:
            return thread.join()
        except BaseException:
            if not thread.done():  # this wait was interrupted, as by Ctrl-C
                open_.cancel()
                with suppress(Exception):
                    thread.join()

            raise
        finally:
            open_.failure = None, None, None  # what has ended may be kept by a reference cycle of anyio's
            del failure

    def abandon(self) -> None:
        """Forget the thread. For a fork of the process, which has no such thread to wait for."""
        self._forget()

    def _forget(self) -> tuple[_Open[ResourceT] | None, BackgroundCall[bool | None] | None]:
        with self._lock:
            found = self._open, self._thread
            finalizer, self._finalizer = self._finalizer, None
            self._open, self._thread = None, None

        if finalizer is not None:
            finalizer.detach()

        return found

    def _prepare(
        self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...]
    ) -> tuple[_Calls, _Call, ResultBox[T]]:
        open_ = self._opened()
        box = ResultBox(partial(function, open_.resource, *args))
        return open_.calls, _Call(box.run), box

    def _opened(self) -> _Open[ResourceT]:
        with self._lock:
            if self._open is None:
                opened: Future[_Open[ResourceT]] = Future()
                thread = start_thread(_run, self._make, opened, name=self._name, daemon=True)
                self._open, self._thread = opened.result(), thread
                self._finalizer = weakref.finalize(self, self._open.stop)
                self._finalizer.atexit = False

            return self._open


def _wait(calls: _Calls, call: _Call) -> None:
    try:
        calls.begin(call)  # an interrupt may come as soon as it has begun, and must find the call
        call.future.result()
    except BaseException:
        call.future.cancel()
        raise


def _run(
    make: Callable[[], AbstractAsyncContextManager[ResourceT]], opened: Future[_Open[ResourceT]]
) -> bool | None:
    try:
        return anyio.run(_hold_open, make, opened)
    except BaseException as error:
        if opened.done():
            raise

        opened.set_exception(error)
        return None


async def _hold_open(
    make: Callable[[], AbstractAsyncContextManager[ResourceT]], opened: Future[_Open[ResourceT]]
) -> bool | None:
    suppressed: bool | None = None
    failure: BaseException | None = None
    with CancelScope() as scope:
        async with create_task_group() as tasks:
            mark_own_loop()
            calls = _Calls(tasks, LoopHandle(), copy_context())
            try:
                suppressed = await _enter_and_wait(make(), calls, scope, opened)
            except Exception as error:
                failure = error  # raised below, as it is and not in a group
            finally:
                calls.end()

            # As where a caller's `with` block ends on an error: calls that still go on are given up.
            if failure is not None or suppressed is False:
                tasks.cancel_scope.cancel()

    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # the traceback refers to this frame

    return suppressed


async def _enter_and_wait(
    manager: AbstractAsyncContextManager[ResourceT],
    calls: _Calls,
    scope: CancelScope,
    opened: Future[_Open[ResourceT]],
) -> bool | None:
    """Return what the manager's `__aexit__` does of the caller's error: None if there is none."""
    stopping = Event()
    open_ = _Open(await manager.__aenter__(), calls, stopping, calls.loop, scope)
    try:
        opened.set_result(open_)
        await stopping.wait()
    except BaseException:
        await manager.__aexit__(*sys.exc_info())
        raise

    suppresses = await manager.__aexit__(*open_.failure)
    return None if open_.failure[0] is None else bool(suppresses)
