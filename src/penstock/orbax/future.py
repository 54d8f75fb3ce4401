"""Work of handlers: futures of what runs already, calls that block or run together, and their errors."""

from __future__ import annotations

__all__ = (
    "ChainedFuture",
    "CommitFutureAwaitingContractedSignals",
    "Future",
    "NoopFuture",
    "PipelineFuture",
    "remaining_secs",
)

import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

from penstock import kernel
from penstock.embedding import blocking
from penstock.errors import HandlerFailedError, StageFailedError

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function without blocking the event loop.

    Cancellation:
        Delivered once the function has returned.
    """
    return await kernel.Threads(1).run(function, *args)


async def together(functions: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run async functions concurrently; return their results in the same order.

    Where no event loop runs they block, and run one after another.

    Raises:
        Exception: The first error, as it is. The other functions are cancelled.
    """
    if blocking.in_event_loop():
        return await blocking.together(functions)

    return [await function() for function in functions]


def as_raised(error: BaseException) -> BaseException:
    """Return the handler's own error instead of the one that it caused.

    A note in it says which handler it was, and which leaf. Any other error is returned as it is.
    """
    cause = error.__cause__
    if not isinstance(error, HandlerFailedError | StageFailedError) or not isinstance(cause, Exception):
        return error

    note = str(error)
    if note not in getattr(cause, "__notes__", ()):
        cause.add_note(note)

    return cause


def called_as_raised(function: Callable[..., T], *args: object) -> T:
    """Call a function; raise a handler's own error instead of the one that it caused.

    Raises:
        Exception: What it raises, see `as_raised`.
    """
    try:
        return function(*args)
    except HandlerFailedError as error:
        raised = as_raised(error)

    # Outside of the except clause: the two would refer to each other.
    try:
        raise raised
    finally:
        del raised  # its traceback refers to this frame


async def awaited_as_raised(awaitable: Awaitable[T]) -> T:
    """Await; raise a handler's own error instead of the one that it caused."""
    try:
        return await awaitable
    except HandlerFailedError as error:
        raised = as_raised(error)

    try:
        raise raised
    finally:
        del raised


GRACE_S = 5.0
"""The seconds that the removal of a failed save waits for work that it cancelled."""


class Future(Protocol):
    """The methods that a future needs. Those of `concurrent.futures` and of TensorStore have them."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the work is done.

        Args:
            timeout: The longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: If it is not done by then.
        """
        ...

    def cancel(self) -> bool | None:
        """Ask the work to stop. Does not wait."""
        ...


class NoopFuture:
    """Nothing to wait for."""

    def result(self, timeout: float | None = None) -> Any:
        return None

    def cancel(self) -> None:
        return None


class ChainedFuture:
    """Several futures, and a callback for when all of them are done.

    Args:
        futures: Waited for in this order.
        cb: Called by `result`, in the thread that waits.
    """

    def __init__(self, futures: Sequence[Future], cb: Callable[[], object]) -> None:
        self._futures = tuple(futures)
        self._callback = cb

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all of them, within one timeout.

        Raises:
            TimeoutError: If one is not done by then.
        """
        started = time.monotonic()
        for n_done, future in enumerate(self._futures):
            try:
                future.result(timeout=remaining_secs(started, timeout))
            except TimeoutError as error:
                raise TimeoutError(
                    f"ChainedFuture completed {n_done}/{len(self._futures)} futures but timed out after "
                    f"{time.monotonic() - started:.2f} seconds"
                ) from error

        self._callback()

    def cancel(self) -> None:
        """Cancel each."""
        for future in self._futures:
            future.cancel()


class CommitFutureAwaitingContractedSignals:
    """A coroutine that runs in its own thread, from construction on.

    Args:
        coro: The coroutine.
        name: The name of the thread.
        send_signals: Has no effect: there are no signals.
        timeout_secs: Has no effect: there is nothing to wait for.
        operation_id: Has no effect.
    """

    def __init__(
        self,
        coro: Coroutine[Any, Any, None],
        *,
        name: str | None = None,
        send_signals: Sequence[Any] | None = None,
        timeout_secs: int | None = None,
        operation_id: str | None = None,
    ) -> None:
        async def run() -> None:
            await coro

        self._future = blocking.start_loop(run, name=name or "penstock.orbax.commit")

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it.

        Raises:
            TimeoutError: If it is not done by then.
            Exception: What it raised.
        """
        return self._future.result(timeout)

    def cancel(self) -> None:
        """Cancel it before it starts; once started, it runs to its end."""
        self._future.cancel()


class PipelineFuture:
    """A save in penstock's pipeline.

    Args:
        save: A `penstock.SaveFuture`, or an object with its `result` and `cancel`.
        keep: An object that must live as long as the save runs.
    """

    def __init__(self, save: Any, keep: object = None) -> None:
        self._save = save
        self._keep = keep

    def result(self, timeout: float | None = None) -> Any:
        """Wait until everything is durable.

        Raises:
            TimeoutError: If it is not by then.
            PenstockError: If the save failed.
            Exception: What a handler of the caller's raised.
        """
        try:
            called_as_raised(self._save.result, timeout)
        except TimeoutError:
            raise
        except BaseException:
            self._keep = None  # the error's traceback refers to this frame
            raise

        self._keep = None

    def cancel(self) -> None:
        """Ask the save to stop."""
        self._save.cancel()


def remaining_secs(started: float, timeout: float | None) -> float | None:
    """Return what is left of a timeout that began at `started`, a `time.monotonic()`.

    Raises:
        TimeoutError: If nothing is.
    """
    if timeout is None:
        return None

    left = started + timeout - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"Timed out after {timeout} seconds")

    return left


def all_futures(found: Any) -> list[Future]:
    """Return the futures in what `async_save` returned: perhaps None, perhaps lists in lists."""
    if found is None:
        return []
    if isinstance(found, list | tuple):
        return [future for some in cast("list[Any]", found) for future in all_futures(some)]

    return [found]


def cancel_all(futures: Sequence[Future]) -> None:
    """Ask all work to stop. Does not wait."""
    for future in futures:
        with suppress(Exception):
            future.cancel()


def stopped(futures: Sequence[Future]) -> bool:
    """Ask all work to stop; return whether it has, within a few seconds."""
    cancel_all(futures)
    deadline = time.monotonic() + GRACE_S
    for future in futures:
        try:
            future.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return False
        except BaseException:  # it is over, and the reason of the failure is known
            continue

    return True
