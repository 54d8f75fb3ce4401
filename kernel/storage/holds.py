"""Holds on directories: exclusive while something is built or deleted there, shared while it is read.

Every hold in the library is taken here. On a store without holds each is a `NoHold`.
"""

from __future__ import annotations

__all__ = (
    "BRIEF_WAITS_S",
    "NoHold",
    "hold_alone",
    "hold_for_reading",
    "hold_with_readers",
    "is_at_work",
    "take_hold",
)

import errno
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, final

from anyio import sleep

from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.store_capabilities import BuildHolds, Hold, ReadHolds
from penstock.kernel.protocols.stores import Store

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads

BRIEF_WAITS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Publishing and deleting hold a checkpoint exclusively, but only briefly: how long to wait for them."""


@final
class NoHold:
    """The hold on a directory of a store without holds."""

    __slots__ = ()

    def release(self) -> None:
        """Do nothing."""


def hold_alone(store: Store, path: str) -> Hold:
    """Hold the directory at `path` exclusively, if the store has such holds. Blocking.

    Raises:
        InUseError: If it is already held.
    """
    return store.hold(path) if isinstance(store, BuildHolds) else NoHold()


def hold_with_readers(store: Store, path: str) -> Hold:
    """Hold the directory at `path` against deletion, as a reader does, if the store has such holds. Blocking.

    Raises:
        InUseError: If it is held exclusively.
        StorageError: With `errno.ENOENT` if there is nothing.
    """
    return store.hold_reading(path) if isinstance(store, ReadHolds) else hold_alone(store, path)


def is_at_work(store: Store, path: str) -> bool:
    """True if somebody builds or writes in the directory at `path`, and has not crashed. Blocking.

    False if that is not known. Looking holds the directory for a moment, as a reader does.
    """
    if not isinstance(store, ReadHolds):
        return False

    try:
        store.hold_reading(path).release()
    except StorageError as error:
        return error.errno == errno.EBUSY

    return False


@asynccontextmanager
async def hold_for_reading(store: Store, threads: Threads, path: str) -> AsyncGenerator[None]:
    """Hold the directory at `path` against deletion, if the store has such holds.

    Never fails because of `path`: if nothing lies there, the following read reports it.
    """
    held = await take_hold(store, threads, path)
    try:
        yield
    finally:
        held.release()


async def take_hold(
    store: Store, threads: Threads, path: str, hold: Callable[[Store, str], Hold] | None = None
) -> Hold:
    """Hold the directory at `path` until the result is released, by default as `hold_for_reading` does.

    Args:
        store: Where it lies.
        threads: For blocking calls.
        path: The directory.
        hold: What takes another hold; what it raises in the end is raised.
    """
    if hold is None and not isinstance(store, ReadHolds):
        return NoHold()

    for wait_s in (*BRIEF_WAITS_S, None):
        try:
            return await _take(hold or hold_with_readers, store, threads, path)
        except StorageError as error:
            if error.errno != errno.EBUSY or wait_s is None:
                if hold is not None:
                    raise

                break  # a medium without holds can still be read, which is all the caller needs

        await sleep(wait_s)

    return NoHold()


async def _take(hold: Callable[[Store, str], Hold], store: Store, threads: Threads, path: str) -> Hold:
    taken: list[Hold] = []  # filled by the thread: if the task is cancelled meanwhile, it is released here
    try:
        await threads.run(lambda: taken.append(hold(store, path)))
    except BaseException:
        for one in taken:
            one.release()

        raise

    return taken[0]
