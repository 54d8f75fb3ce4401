"""What a handler's `async_save` returns: things whose `result` waits for work that goes on already."""

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
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from penstock.blocking.background import start_loop


class Future(Protocol):
    """All that is asked of a future. Those of `concurrent.futures` and of TensorStore have it."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the work to be over.

        Args:
            timeout: Seconds; None: for ever.

        Raises:
            TimeoutError: If it is not over by then.
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
    """Several futures, and what is to be done when all of them are over.

    Args:
        futures: Waited for in this order.
        cb: Called by `result`, in the thread that waits.
    """

    def __init__(self, futures: Sequence[Future], cb: Callable[[], None]) -> None:
        self._futures = tuple(futures)
        self._callback = cb

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all of them, within one timeout.

        Raises:
            TimeoutError: If one is not over by then.
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
    """A coroutine that runs in a thread of its own, from now on.

    Args:
        coro: The coroutine.
        name: Begins the thread's name.
        send_signals: Without effect: in one process there is nobody to tell.
        timeout_secs: Likewise: there is nothing to wait for.
        operation_id: Likewise.
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

        self._future = start_loop(run, name=name or "penstock.orbax.commit")

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it.

        Raises:
            TimeoutError: If it is not over by then.
            Exception: What it raised.
        """
        return self._future.result(timeout)

    def cancel(self) -> None:
        """Keep it from beginning; once begun, it goes on to its end."""
        self._future.cancel()


class PipelineFuture:
    """A save that penstock's pipeline carries through.

    Args:
        save: What to wait for: a `penstock.SaveFuture`, or what is like it.
        keep: What must live as long as the save goes on.
    """

    def __init__(self, save: Any, keep: object = None) -> None:
        self._save = save
        self._keep = keep

    def result(self, timeout: float | None = None) -> Any:
        """Wait until everything is durable.

        Raises:
            TimeoutError: If it is not by then.
            PenstockError: What the save failed with.
        """
        self._save.result(timeout)
        self._keep = None

    def cancel(self) -> None:
        """Ask the save to stop."""
        self._save.cancel()


def remaining_secs(started: float, timeout: float | None) -> float | None:
    """Say how much is left of a timeout that began at `started`, of `time.monotonic`.

    Raises:
        TimeoutError: If nothing is.
    """
    if timeout is None:
        return None

    left = started + timeout - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"Timed out after {timeout} seconds")

    return left
