"""All use of worker threads, and the only way back from a thread that penstock did not start."""

from __future__ import annotations

__all__ = (
    "CallOnce",
    "ForeignFuture",
    "HomeProcess",
    "LoopHandle",
    "OneThread",
    "Threads",
    "await_future",
    "caller_gone",
    "caller_waits",
    "end_if_cancelled",
    "in_event_loop",
    "mark_own_loop",
    "one_thread",
    "start",
)

import math
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from queue import Full, SimpleQueue
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, cast, final

from anyio import (
    CancelScope,
    CapacityLimiter,
    Event,
    Lock,
    NoEventLoopError,
    WouldBlock,
    create_task_group,
    current_time,
    get_cancelled_exc_class,
    move_on_after,
    to_thread,
)
from anyio.abc import TaskGroup
from anyio.from_thread import check_cancelled
from anyio.lowlevel import current_token

from penstock.kernel.errors import ConfigError, ForkedError, NoThreadError

T_co = TypeVar("T_co", covariant=True)


def end_if_cancelled() -> None:
    """Raise what cancels the save or restore that this thread works for, if anything does."""
    with suppress(NoEventLoopError):  # this is no thread of an event loop
        check_cancelled()


class ForeignFuture(Protocol[T_co]):
    """A future that other threads complete: TensorStore's, or `concurrent.futures.Future`."""

    def add_done_callback(self, callback: Callable[[Any], None], /) -> object: ...
    def cancel(self) -> object: ...
    def result(self) -> T_co: ...


T = TypeVar("T")


class _AsyncioLoop(Protocol):
    def call_soon_threadsafe(self, callback: Callable[[], object]) -> object: ...
    def is_closed(self) -> bool: ...


class _TrioToken(Protocol):
    def run_sync_soon(self, callback: Callable[[], object]) -> object: ...


@final
class HomeProcess:
    """The process that created this object."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True if the code runs in that process, and not in a fork of it."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Raise unless this is that process.

        Raises:
            ForkedError: In a fork, where anything that waits for the loop would hang.
        """
        if os.getpid() != self._pid:
            raise ForkedError(what, self._pid)


@final
class LoopHandle:
    """The running event loop, as seen from other threads.

    `anyio.from_thread.run_sync` makes the calling thread wait for the loop; a thread that belongs to
    a storage driver must not. `post` returns at once, on either backend.

    Raises:
        anyio.NoEventLoopError: If created outside a running loop.
    """

    __slots__ = ("_loop", "_post")

    def __init__(self) -> None:
        token = current_token()
        self._loop: _AsyncioLoop | None = None
        if token.backend_class.__module__.endswith("trio"):
            self._post = cast("_TrioToken", token.native_token).run_sync_soon
        else:
            self._loop = cast("_AsyncioLoop", token.native_token)
            self._post = self._loop.call_soon_threadsafe

    @property
    def can_be_closed(self) -> bool:
        """True if it can be stopped and closed while tasks are under way: asyncio's can, trio's cannot."""
        return self._loop is not None

    @property
    def is_closed(self) -> bool:
        """True if it was closed, and will never run again."""
        return self._loop is not None and self._loop.is_closed()

    def end_workers(self) -> None:
        """Have the worker threads of this loop end, which will never run again. From any thread.

        AnyIO has them end with the task that the loop was started with. Of a loop that was stopped before,
        that task never ends, and its threads would keep the interpreter from ending.
        """
        for thread in threading.enumerate():
            if self._loop is not None and getattr(thread, "loop", None) is self._loop:
                stop = getattr(thread, "stop", None)
                if type(thread).__module__.startswith("anyio.") and stop is not None:
                    with suppress(Full):  # it was asked before
                        stop()

    def post(self, callback: Callable[[], object]) -> None:
        """Have the loop call `callback` soon. From any thread; does nothing if the loop has ended."""
        try:
            self._post(callback)
        except RuntimeError:
            # asyncio's "Event loop is closed" and trio's RunFinishedError: no task is waiting any more.
            return


_OWN_LOOP: Final[ContextVar[weakref.ref[Any] | None]] = ContextVar("penstock.own_loop", default=None)


def mark_own_loop() -> None:
    """Note that penstock runs this event loop for callers who wait meanwhile: no task of theirs is in it.

    For the task that calls it, and those that it starts.
    """
    _OWN_LOOP.set(weakref.ref(current_token().native_token))


def in_event_loop() -> bool:
    """Return whether an event loop runs here: otherwise what blocks delays nobody but its caller."""
    try:
        current_token()
    except NoEventLoopError:
        return False

    return True


def _delays_nobody() -> bool:
    """True in a loop that is marked as penstock's own, and where none runs."""
    try:
        here = current_token().native_token
    except NoEventLoopError:
        return True

    marked = _OWN_LOOP.get()  # a context may be copied into another loop
    return marked is not None and marked() is here


_WAITING: Final[ContextVar[_WaitingCaller | None]] = ContextVar("penstock.waiting_caller", default=None)

LEAVES_WITHIN_S: Final = 0.05
"""So long background work waits for a caller to go on, at most."""


@contextmanager
def caller_waits() -> Generator[None]:
    """Have what may be done after this block begin after it.

    For a call that another thread waits for, in which work begins that goes on when the call is over. Threads
    that compute would take processors, and the interpreter, from the caller on its way out. One block in
    another is a part of it.
    """
    if _WAITING.get() is not None:
        yield
        return

    caller = _WaitingCaller()
    token = _WAITING.set(caller)
    try:
        yield
    finally:
        _WAITING.reset(token)
        caller.leave()


async def caller_gone() -> None:
    """Wait until the caller has gone on that this work began for, if it said that it waits. Bounded."""
    caller = _WAITING.get()
    if caller is not None:
        with move_on_after(LEAVES_WITHIN_S):
            await caller.gone()


@final
class _WaitingCaller:
    """A caller in another thread. Thread-safe."""

    __slots__ = ("_has_left", "_lock", "_wake")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_left = False
        self._wake: list[Callable[[], object]] = []

    def leave(self) -> None:
        with self._lock:
            self._has_left = True
        for wake in self._wake:  # none is added any more
            wake()

    async def gone(self) -> None:
        event, loop = Event(), LoopHandle()
        with self._lock:
            if self._has_left:
                return

            self._wake.append(lambda: loop.post(event.set))

        await event.wait()


def start(thread: threading.Thread) -> None:
    """Start a thread of penstock's own.

    Raises:
        NoThreadError: If there can be no more.
    """
    try:
        thread.start()
    except RuntimeError as refusal:
        raise NoThreadError(str(refusal)) from refusal


async def await_future(future: ForeignFuture[T]) -> T:
    """Wait for a future that other threads complete (TensorStore's), without a thread and without polling.

    Returns:
        The future's result.

    Raises:
        Exception: Whatever the future raises, untranslated.
        concurrent.futures.CancelledError: If somebody else cancelled the future.

    Cancellation:
        Asks the future to cancel and does not wait for it.
    """
    done = Event()
    loop = LoopHandle()
    future.add_done_callback(lambda _: loop.post(done.set))
    try:
        await done.wait()
    except BaseException:
        future.cancel()
        raise

    try:
        return future.result()
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # TensorStore says asyncio.CancelledError, which would end the task in silence.
        raise CancelledError("the future was cancelled by something other than its waiter") from error
    finally:
        del future  # the traceback refers to this frame


@final
class _NoLimiter:
    """The limiter of a call that has its thread already. Any other one would take a turn of the loop."""

    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *_: object) -> None: ...
    async def acquire_on_behalf_of(self, borrower: object) -> None: ...
    def release_on_behalf_of(self, borrower: object) -> None: ...


_TAKEN: Final = _NoLimiter()


@final
class Threads:
    """Worker threads for blocking calls, at most `limit` at a time.

    One instance serves one event loop; every blocking call of penstock goes through one.

    Args:
        limit: Threads busy at once; positive.
    """

    __slots__ = ("_leaves", "_limiter", "_patience_s")

    def __init__(self, limit: int = 8) -> None:
        if limit <= 0:
            raise ConfigError("threads", f"must be positive, not {limit}")

        self._limiter = CapacityLimiter(limit)
        self._patience_s = math.inf
        self._leaves = False  # whether calls may be left

    def leaving_calls(self, after_s: float) -> Threads:
        """Return these threads for calls without effects, such as reads, which a cancellation may leave.

        Args:
            after_s: How many seconds a cancelled `run` waits for its call. Then it ends without it, and the
                call goes on in its thread, unheard: the medium hangs, and nothing can interrupt a system
                call. What it reads into and has opened lives as long as it does.
        """
        other = Threads()
        other._limiter, other._patience_s = self._limiter, after_s
        other._leaves = True
        return other

    def allow(self, limit: int) -> None:
        """Let at least so many threads be busy at once. There are never fewer than before."""
        self._limiter.total_tokens = max(self._limiter.total_tokens, limit)

    @property
    def limit(self) -> int:
        """Threads that may be busy at once."""
        return int(self._limiter.total_tokens)

    @property
    def busy(self) -> int:
        """Threads at work now; 0 once everything that was started has ended."""
        return self._limiter.statistics().borrowed_tokens

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` in a worker thread.

        Cancellation:
            The call is not interrupted: the cancellation is delivered once it has returned, so
            that nothing it does outlives the caller; but see `leaving_calls`.
        """
        call = _Call(function, args)
        # Held here, and not by the call: what is left no longer counts as busy.
        try:
            self._limiter.acquire_nowait()  # takes no turn of the loop: the call does
        except WouldBlock:
            await self._limiter.acquire()

        try:
            await to_thread.run_sync(
                call, abandon_on_cancel=self._leaves, limiter=cast("CapacityLimiter", _TAKEN)
            )
        except get_cancelled_exc_class():
            await call.wait_over(self._patience_s)
            raise
        except RuntimeError as refusal:  # not of the call: that is left in it
            raise NoThreadError(str(refusal)) from refusal
        finally:
            self._limiter.release()

        return call.take()

    async def run_briefly(self, function: Callable[..., T], *args: Any) -> T:
        """Do what `run` does, with what mostly computes; at once where that delays no task of others.

        That is in a loop that is marked as penstock's own, and where none runs. Callers wait for the result
        in any case, and longer for a thread to take the call.
        """
        return function(*args) if _delays_nobody() else await self.run(function, *args)

    def call_once(self, function: Callable[..., T], *args: Any) -> CallOnce[T]:
        """Return an async callable that runs `function(*args)` in a thread once; every call waits for it.

        For blocking waits that cannot be interrupted. The arguments live as long as the call.

        Cancellation:
            Does not wait for the call: it continues in its thread and can be awaited again.
        """
        return CallOnce(function, args, self._limiter)


@final
class CallOnce(Generic[T]):
    """One call in a thread that several tasks can await, and any of them can stop awaiting."""

    __slots__ = ("_args", "_beginning", "_function", "_has_begun", "_limiter", "_outcome")

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...], limiter: CapacityLimiter) -> None:
        self._function = function
        self._args = args
        self._limiter = limiter
        self._beginning = Lock()
        self._has_begun = False
        self._outcome: Future[T] = Future()

    async def __call__(self) -> T:
        async with self._beginning:
            if not self._has_begun:
                await self._begin()

        await await_future(_ShieldedFuture(self._outcome))
        return self._outcome.result()

    async def _begin(self) -> None:
        """Have a thread make the call. If this ends before one does, the next waiter begins it."""
        await self._limiter.acquire_on_behalf_of(self)
        # Given back by the call, and not by a waiter that leaves it: its thread is busy for as long.
        release = partial(self._limiter.release_on_behalf_of, self)
        call = _Call[None](self._settle, (partial(LoopHandle().post, release),))
        try:
            await to_thread.run_sync(call, abandon_on_cancel=True, limiter=cast("CapacityLimiter", _TAKEN))
        except RuntimeError as refusal:  # not of the call: that is left in its outcome
            raise NoThreadError(str(refusal)) from refusal
        finally:
            self._has_begun = call.has_begun()
            if not self._has_begun:
                release()

    def when_over(self, then: Callable[[], object]) -> None:
        """Call `then` once the call has returned: in its thread, or at once if it has."""
        self._outcome.add_done_callback(lambda _: then())

    def _settle(self, release: Callable[[], object]) -> None:
        function, args = self._function, self._args
        self._args = ()  # they live in this frame, and no longer
        try:
            value = function(*args)
        except BaseException as error:
            release()  # before any waiter hears of the end
            self._outcome.set_exception(error)
        else:
            release()
            self._outcome.set_result(value)
        finally:
            del self, function, args  # the traceback refers to this frame


@final
class _ShieldedFuture(Generic[T]):
    """A future that is not cancelled when a task that waits for it is."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
        self._future.add_done_callback(callback)

    def cancel(self) -> object:
        return False

    def result(self) -> None:
        return None


@final
class _Call(Generic[T]):
    """A call in a thread whose end can be waited for again after a cancellation.

    AnyIO shields its wait for the thread, but asyncio's own `Task.cancel` goes through every shield.

    What the call returns or raises is left here: on its way through the threads of trio an error would come
    into a reference cycle, which keeps alive all that the frames above have.
    """

    __slots__ = ("_call", "_error", "_lock", "_state", "_value", "_wake")

    def __init__(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._call: tuple[Callable[..., T], tuple[Any, ...]] | None = (function, args)  # until it begins
        self._value: T | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._state: Literal["waiting", "running", "over"] = "waiting"
        self._wake: Callable[[], object] | None = None

    def __call__(self) -> None:
        with self._lock:
            call, self._call = self._call, None
            if call is None:
                return  # and it is not waited for

            self._state = "running"

        function, args = call
        del call
        try:
            self._value = function(*args)
        except BaseException as error:
            self._error = error
        finally:
            del function, args  # the traceback refers to this frame
            with self._lock:
                self._state = "over"
            if self._wake is not None:
                self._wake()

    def take(self) -> T:
        """Return what the call returned, or raise what it raised. Once: neither lives on here."""
        value, error = self._value, self._error
        self._value = self._error = None
        if error is None:
            return cast("T", value)
        try:
            raise error
        finally:
            del error  # the traceback refers to this frame

    def has_begun(self) -> bool:
        """True if the call runs or ran; if not, it never will."""
        with self._lock:
            if self._state == "waiting":
                self._state, self._call = "over", None
                return False

            return True

    async def wait(self) -> None:
        """Wait until the call has returned.

        Cancellation:
            Leaves the call as it is; `wait_over` goes on waiting.
        """
        event, loop = Event(), LoopHandle()
        with self._lock:
            if self._state == "over":
                return

            self._wake = lambda: loop.post(event.set)

        await event.wait()

    async def wait_over(self, most_s: float = math.inf) -> None:
        """Wait until the call has returned, for at most so long. If it has not begun, it never will."""
        if not self.has_begun():
            return

        with CancelScope(shield=True, deadline=current_time() + most_s) as waiting:
            while self._state != "over":
                try:
                    await self.wait()
                except get_cancelled_exc_class():
                    if waiting.cancel_called:  # and not by asyncio, from outside
                        raise


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
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` in the thread.

        Cancellation:
            As `Threads.run`: a call that has begun is not interrupted, and is waited for.
        """
        if not self._begun:
            self._begun = True
            self._tasks.start_soon(Threads(1).run, self._serve, name="penstock thread")

        call = _Call(function, args)
        self._calls.put(call)
        del args  # the traceback of an error refers to this frame
        try:
            await call.wait()
        except BaseException:
            await call.wait_over()
            raise

        return call.take()

    def close(self) -> None:
        """End the thread once it has made all requested calls."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # the result belongs to the caller now

        if self._at_end is not None:
            self._at_end()
