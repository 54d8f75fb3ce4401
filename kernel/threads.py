"""The one door to worker threads, and the one way back from a thread that is not ours."""

from __future__ import annotations

__all__ = ("LoopHandle", "Threads", "await_future")

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast, final

from anyio import CapacityLimiter, Event, to_thread
from anyio.lowlevel import current_token

from penstock.kernel.errors import ConfigError
from penstock.kernel.protocols import ForeignFuture

T = TypeVar("T")


class _AsyncioLoop(Protocol):
    def call_soon_threadsafe(self, callback: Callable[[], object]) -> object: ...


class _TrioToken(Protocol):
    def run_sync_soon(self, callback: Callable[[], object]) -> object: ...


@final
class LoopHandle:
    """The running event loop, as seen from other threads.

    `anyio.from_thread.run_sync` makes the calling thread wait for the loop; a thread that belongs to
    a storage driver must not. `post` returns at once, on either backend.

    Raises:
        anyio.NoEventLoopError: If created outside a running loop.
    """

    __slots__ = ("_post",)

    def __init__(self) -> None:
        token = current_token()
        if token.backend_class.__module__.endswith("trio"):
            self._post = cast("_TrioToken", token.native_token).run_sync_soon
        else:
            self._post = cast("_AsyncioLoop", token.native_token).call_soon_threadsafe

    def post(self, callback: Callable[[], object]) -> None:
        """Have the loop call `callback` soon. From any thread; does nothing if the loop has ended."""
        try:
            self._post(callback)
        except RuntimeError:
            # asyncio's "Event loop is closed" and trio's RunFinishedError: nobody is waiting any more.
            return


async def await_future(future: ForeignFuture[T]) -> T:
    """Wait for a future that other threads complete (TensorStore's), without a thread and without polling.

    Returns:
        The future's result.

    Raises:
        BaseException: Whatever the future raises, untranslated.

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

    return future.result()


@final
class Threads:
    """Worker threads for blocking calls, at most `limit` at a time.

    One instance serves one event loop; every blocking call of penstock goes through one.

    Args:
        limit: Threads busy at once; positive.
    """

    __slots__ = ("_limiter",)

    def __init__(self, limit: int = 8) -> None:
        if limit <= 0:
            raise ConfigError("threads", f"must be positive, not {limit}")

        self._limiter = CapacityLimiter(limit)

    @property
    def busy(self) -> int:
        """Threads at work now; 0 once everything that was started has ended."""
        return self._limiter.statistics().borrowed_tokens

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` in a worker thread.

        Cancellation:
            The call is not interrupted: the cancellation is delivered once it has returned, so
            that nothing it does outlives the caller.
        """
        return await to_thread.run_sync(function, *args, limiter=self._limiter)
