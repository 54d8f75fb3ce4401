"""Store operations that block until a test releases them. Public in `penstock.testing`."""

from __future__ import annotations

__all__ = ("Hang", "Operation")

import threading
from dataclasses import dataclass
from typing import final

from anyio import to_thread

from penstock.kernel.errors import StorageError


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a store, or of a file it opened."""

    name: str  #: as in `publish`, `data.write_at` (of a file being written), `file.read_at` (being read)
    path: str


@final
class Hang:
    """An operation that blocks until it is released.

    Args:
        then: What it raises when released; None to go on as usual.
        limit_s: Seconds after which it fails by itself, so that a broken test ends.
    """

    __slots__ = ("_limit_s", "_reached", "_released", "_then")

    def __init__(self, then: Exception | None = None, limit_s: float = 30.0) -> None:
        self._then = then
        self._limit_s = limit_s
        self._reached = threading.Event()
        self._released = threading.Event()

    async def wait_reached(self) -> None:
        """Wait until the operation hangs.

        Cancellation:
            The waiting thread is left behind, for no longer than `limit_s`.
        """
        await to_thread.run_sync(self.wait_reached_blocking, abandon_on_cancel=True)

    def wait_reached_blocking(self) -> None:
        """Wait until the operation hangs, in a thread."""
        if not self._reached.wait(self._limit_s):
            raise TimeoutError(f"the operation did not begin within {self._limit_s} s")

    def release(self) -> None:
        """Let the operation go on. Idempotent; may be called before the operation begins."""
        self._released.set()

    def skip(self) -> None:
        """Note that the operation will not happen, which ends all waits for it. Idempotent."""
        self._reached.set()
        self._released.set()

    def hold(self, operation: Operation) -> None:
        """Block the calling thread, which performs the operation. Called by the store.

        Raises:
            StorageError: If it is not released in time.
            Exception: The one given as `then`.
        """
        self._reached.set()
        if not self._released.wait(self._limit_s):
            raise StorageError(operation.name, operation.path, f"still hung after {self._limit_s} s")
        if self._then is not None:
            raise self._then
