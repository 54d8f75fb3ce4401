"""Holding what is being read, so that nobody on this machine deletes it meanwhile."""

from __future__ import annotations

__all__ = (
    "NoHold",
    "hold_for_reading",
    "take_hold",
)

import errno
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, final

from anyio import sleep

from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import Hold, ReadHolds, Store

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads

_WAITS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Whoever publishes or deletes a checkpoint holds it alone, but not for long."""


@final
class NoHold:
    """The hold of a store that has none."""

    __slots__ = ()

    def release(self) -> None:
        """Do nothing."""


@asynccontextmanager
async def hold_for_reading(store: Store, threads: Threads, path: str) -> AsyncGenerator[None]:
    """Hold the directory at `path` against deletion, as far as the store can.

    Who reads what is not there, or is no directory, is told so by the reading.
    """
    held = await take_hold(store, threads, path)
    try:
        yield
    finally:
        held.release()


async def take_hold(store: Store, threads: Threads, path: str) -> Hold:
    """Hold the directory at `path` until the result is released; the same as `hold_for_reading`."""
    if not isinstance(store, ReadHolds):
        return NoHold()

    for wait_s in (*_WAITS_S, None):
        try:
            return await _taken(store, threads, path)
        except StorageError as error:
            # A medium that cannot be held can perhaps be read, and that is what was asked for.
            if error.errno != errno.EBUSY or wait_s is None:
                break

        await sleep(wait_s)

    return NoHold()


async def _taken(store: ReadHolds, threads: Threads, path: str) -> Hold:
    taken: list[Hold] = []  # by the thread: a task that is cancelled meanwhile would lose it unreleased
    try:
        await threads.run(lambda: taken.append(store.hold_reading(path)))
    except BaseException:
        for hold in taken:
            hold.release()

        raise

    return taken[0]
