"""Runs what only looks without an event loop: a command that is over at once does not wait for its import."""

from __future__ import annotations

__all__ = ("run_here",)

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

from penstock.kernel.protocols.stores import Store

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads

T = TypeVar("T")


def run_here(store: Store, read: Callable[[Threads], Coroutine[Any, Any, T]]) -> T:
    """Return the result of what only looks: calls that may block are made here, one after the other.

    An event loop, whose import takes a tenth of such a command, is run only where something has to be
    waited for: for a network, or for a deletion to end.

    Args:
        store: Where is looked.
        read: Has no effects: it may be called twice. It waits for calls of the threads that it gets, and
            for nothing else that may take long.
    """
    if not store.over_network:
        coroutine = read(cast("Threads", _CallingThread()))
        try:
            coroutine.send(None)
        except StopIteration as end:
            return cast("T", end.value)
        except RuntimeError:  # it asked for an event loop
            pass
        finally:
            coroutine.close()

    import anyio

    from penstock.kernel.concurrency.threads import Threads

    return anyio.run(read, Threads())


@final
class _CallingThread:
    """Stands for worker threads: makes each call at once."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)
