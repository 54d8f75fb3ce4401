"""Holds of readers on directories: how long they wait for one, and where they do without.

A store that has no holds gives a `NoHold`.
"""

from __future__ import annotations

__all__ = (
    "BRIEF_WAITS_S",
    "hold_for_reading",
    "is_at_work",
    "take_hold",
)

import errno
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from anyio import sleep

from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import Hold, NoHold, Store

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads

BRIEF_WAITS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Publishing and deleting hold a checkpoint exclusively, but only briefly: how long to wait for them."""


def is_at_work(store: Store, path: str) -> bool:
    """True if a live process builds or writes in the directory at `path`. Blocking.

    False if that is not known. Looking holds the directory for a moment, as a reader does.
    """
    try:
        store.hold_reading(path).release()
    except StorageError as error:
        return error.errno == errno.EBUSY

    return False


@asynccontextmanager
async def hold_for_reading(store: Store, threads: Threads, path: str) -> AsyncGenerator[None]:
    """Hold the directory at `path` against deletion, in a store that can.

    Never fails because of `path`: if nothing is there, the following read reports it.
    """
    held = await take_hold(store, threads, path)
    try:
        yield
    finally:
        held.release()


async def take_hold(
    store: Store, threads: Threads, path: str, hold: Callable[[str], Hold] | None = None
) -> Hold:
    """Hold the directory at `path` until the result is released, by default as `hold_for_reading` does.

    Args:
        store: Where it is.
        threads: For blocking calls.
        path: The directory.
        hold: What takes another hold; what it raises in the end is raised.
    """
    if hold is None and store.directories is None:  # nothing is held there: a hop to a thread is saved
        return NoHold()

    taken: list[Hold] = []  # filled by the thread: if the task is cancelled meanwhile, it is released here
    take, waits = hold or store.hold_reading, iter(BRIEF_WAITS_S)
    while True:
        try:
            await threads.run(lambda: taken.append(take(path)))
            return taken[0]
        except StorageError as error:
            wait_s = next(waits, None)
            if error.errno != errno.EBUSY or wait_s is None:
                if hold is not None:
                    raise

                return NoHold()  # a medium without holds can still be read, which is all the caller needs
        except BaseException:
            for one in taken:
                one.release()

            raise

        await sleep(wait_s)
