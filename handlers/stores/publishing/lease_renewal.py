"""The heartbeat of builds and holds that are leases, for as long as a program uses them."""

from __future__ import annotations

__all__ = ("renewing_leases",)

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from anyio import CancelScope, sleep

from penstock.kernel.concurrency.threads import Threads

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from penstock.kernel.protocols.stores import ObjectStore

_PER_LEASE: Final = 3
"""Renewals. Two of them may fail before a lease is over."""


@contextmanager
def renewing_leases(
    tasks: TaskGroup, stores: Callable[[], Iterable[ObjectStore]], lease_s: float
) -> Generator[None]:
    """Renew what stores build and hold, three times in each lease, while the body runs.

    While the event loop stands still nothing is renewed. That is safe: of who was taken over, the next swap
    fails, before anything is published or deleted. At the end a request under way is waited for.

    Args:
        tasks: In which the renewals go on.
        stores: Returns those to renew, which may become more.
        lease_s: The shortest of their leases.
    """
    scope = CancelScope()
    threads = Threads(1)  # of its own: eight long uploads must not keep a renewal waiting

    async def renew() -> None:
        with scope:
            while True:
                await sleep(lease_s / _PER_LEASE)
                for store in stores():
                    await threads.run(store.renew_leases)

    tasks.start_soon(renew, name="penstock leases")
    try:
        yield
    finally:
        scope.cancel()
