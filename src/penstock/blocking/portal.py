"""An event loop in a thread, for code that has none."""

from __future__ import annotations

__all__ = ("Portal", "refuse_running_loop", "run_once")

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, final

from anyio import NoEventLoopError
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.lowlevel import current_token

from penstock.checkpointer.process_exit import Stopping
from penstock.kernel.errors import ClosedError, RunningLoopError

T = TypeVar("T")


@final
class Portal:
    """Holds an async context manager open in a thread, as long as it is entered, and calls into it.

    Args:
        inner: What is entered there.
        name: What callers call it, for messages.
        stopping: What its Checkpointer does about the end of this process, if it has one.
    """

    __slots__ = ("_inner", "_name", "_portal", "_stack", "_stopping")

    def __init__(
        self, inner: AbstractAsyncContextManager[Any], name: str, stopping: Stopping | None = None
    ) -> None:
        refuse_running_loop()
        self._inner = inner
        self._stopping = stopping
        self._name = name
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Portal:
        refuse_running_loop()
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self._inner))
            if self._stopping is not None:
                stack.enter_context(self._stopping.holding_sigterm())

            self._stack = stack.pop_all()

        if self._stopping is not None:
            # What the interpreter finds unclosed at its end it would close, by a loop that is dead by then.
            self._stopping.keeps = self._stack

        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        portal, self._portal = self._portal, None
        if self._stopping is not None and not self._stopping.is_home:
            self._forget(portal)
            return None

        if self._stopping is not None:
            self._stopping.keeps = None

        return self._stack.__exit__(exc_type, exc_val, exc_tb)

    def _forget(self, portal: BlockingPortal | None) -> None:
        """In a fork: have nobody wait for a loop and a thread that are not here, not even when collected."""
        if portal is not None:
            with suppress(StopIteration, RuntimeError):
                portal.stop().send(None)  # only notes that it has stopped

        self._stack.pop_all()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, **keywords: Any) -> T:
        """Await `function(...)` in the loop."""
        return self._open().call(partial(function, *args, **keywords))

    def call_plain(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that is not async in the loop."""

        async def call() -> T:
            return function(*args)

        return self._open().call(call)

    def iterate(self, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """Yield what an async iterator does, each in its turn; it is closed when this one is."""
        values = self.call_plain(make)
        try:
            while True:
                try:
                    value = self.call(values.__anext__)
                except StopAsyncIteration:
                    return

                yield value
        finally:
            if self._portal is not None:
                self.call(_close, values)

    def _open(self) -> BlockingPortal:
        refuse_running_loop()
        if self._stopping is not None:
            self._stopping.check_process()
        if self._portal is None:
            raise ClosedError(f"the {self._name} is not open; use it inside its `with`")

        return self._portal


def run_once(function: Callable[[], Awaitable[T]]) -> T:
    """Run one call in an event loop of its own."""
    refuse_running_loop()
    with start_blocking_portal() as portal:
        return portal.call(function)


def refuse_running_loop() -> None:
    """Refuse to block.

    Raises:
        RunningLoopError: If an event loop is running here.
    """
    try:
        current_token()
    except NoEventLoopError:
        return

    raise RunningLoopError(
        "penstock.sync would block the event loop that is running here; await penstock.save, "
        "penstock.restore or a penstock.Checkpointer instead"
    )


async def _close(values: Any) -> None:
    await values.aclose()
