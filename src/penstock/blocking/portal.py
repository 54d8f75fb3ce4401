"""The portal of `penstock.sync`: an async context manager, held open in a thread."""

from __future__ import annotations

__all__ = ("Portal", "refuse_running_loop", "run_once")

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from functools import partial
from inspect import currentframe
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast, final

from anyio import NoEventLoopError
from anyio.lowlevel import EventLoopToken, current_token

from penstock.blocking.loop_thread import LoopThread
from penstock.checkpointer.process_exit import Stopping
from penstock.kernel.errors import ClosedError, RunningLoopError
from penstock.kernel.pipeline.failures import forget_on_error

T = TypeVar("T")


@final
class Portal:
    """Holds an async context manager open in a thread while it is entered itself, and calls into it.

    In IPython the first call enters it, and it stays open until `close`.

    Args:
        inner: The context manager.
        name: What callers call it, for messages.
        stopping: What its Checkpointer does when the process ends, if it has one.
    """

    __slots__ = ("_is_lasting", "_is_open", "_is_over", "_name", "_stack", "_stopping", "_thread")

    def __init__(
        self, inner: AbstractAsyncContextManager[Any], name: str, stopping: Stopping | None = None
    ) -> None:
        refuse_running_loop()
        self._name = name
        self._stopping = stopping
        self._thread: LoopThread[Any] = LoopThread(lambda: inner, name=f"penstock {name}")
        self._is_open = False
        self._is_lasting = False
        self._is_over = False
        self._stack = ExitStack()

    def __enter__(self) -> Portal:
        refuse_running_loop()
        with ExitStack() as stack:
            stack.enter_context(self._thread)
            if self._stopping is not None:
                stack.enter_context(self._stopping.holding_sigterm())

            self._stack = stack.pop_all()

        self._is_open = True
        if self._stopping is not None:
            # The interpreter would close what it finds open when it ends, in a loop that is dead by then.
            self._stopping.keeps = self._stack

        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        self._is_open = False
        if self._stopping is not None and not self._stopping.home.is_here:
            # In a fork neither the loop nor its thread exists.
            self._thread.abandon()
            self._stack.pop_all()
            return None

        if self._stopping is not None:
            self._stopping.keeps = None

        return self._stack.__exit__(exc_type, exc_val, exc_tb)

    def close(self) -> None:
        """Leave what a first call entered, and let no other one do that. Idempotent.

        What a `with` entered is left at the end of it.

        Raises:
            PenstockError: What leaving it raises, as at the end of a `with`.
        """
        self._is_over = True
        if self._is_lasting and self._is_open:
            self.__exit__(None, None, None)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, **keywords: Any) -> T:
        """Await `function(...)` in the loop."""
        calls = [partial(function, *args, **keywords)]
        del function, args, keywords  # a failure keeps nothing that the caller gave

        async def call(_: object) -> T:
            return await calls.pop()()

        with forget_on_error():
            return self._open_thread().call(call)

    def call_plain(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that is not async in the loop."""

        async def call(_: object) -> T:
            return function(*args)

        return self._open_thread().call(call)

    def iterate(self, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """Yield what an async iterator yields, one by one. It is closed when this one is."""
        values = self.call_plain(make)
        try:
            while True:
                try:
                    value = self.call(values.__anext__)
                except StopAsyncIteration:
                    return

                yield value
        finally:
            if self._is_open:
                self.call(_close, values)

    def _open_thread(self) -> LoopThread[Any]:
        refuse_running_loop()
        if self._stopping is not None:
            self._stopping.home.check("this Checkpointer")
        if not self._is_open and not self._is_over and in_shell():
            self.__enter__()
            self._is_lasting = True
        if not self._is_open:
            raise ClosedError(f"the {self._name} is not open; use it inside its `with`")

        return self._thread


def run_once(function: Callable[[], Awaitable[T]]) -> T:
    """Run one call in its own event loop, in its own thread.

    Raises:
        RunningLoopError: If an event loop is running here.
    """
    refuse_running_loop()
    calls = [function]
    del function  # a failure keeps nothing that the caller gave

    async def call(_: object) -> T:
        return await calls.pop()()

    with LoopThread(nullcontext[None]) as loop, forget_on_error():
        return loop.call(call)


def refuse_running_loop() -> None:
    """Refuse to block.

    Raises:
        RunningLoopError: If an event loop is running here, and it is not that of a notebook's cell.
    """
    try:
        loop = current_token()
    except NoEventLoopError:
        return

    if is_cell(loop):
        return

    raise RunningLoopError(
        "penstock.sync would block the event loop that is running here; await penstock.save, "
        "penstock.restore or a penstock.Checkpointer instead"
    )


async def _close(values: Any) -> None:
    await values.aclose()


def in_shell() -> bool:
    """True if this process is an interactive IPython: a notebook's kernel, or one in a terminal."""
    return _shell() is not None


def is_cell(loop: EventLoopToken) -> bool:
    """True if the caller is code of a cell, and `loop`, which runs here, is that of IPython's kernel.

    A kernel runs each cell to its end before it looks at its loop again, so a call that blocks there delays
    nothing that would not wait for the cell anyway. A task that a cell has started is no cell.
    """
    shell = _shell()
    kernel = getattr(shell, "kernel", None)
    if kernel is None or loop.native_token is not getattr(kernel.io_loop, "asyncio_loop", None):
        return False

    running: object = cast("Any", type(shell)).run_code.__code__
    frame: FrameType | None = currentframe()
    while frame is not None and frame.f_code is not running:
        frame = frame.f_back

    return frame is not None


def _shell() -> Any:
    """Return IPython's shell; None if this process has none. Imports nothing."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
