"""Reading what is at a path from one state of it, although it may be replaced meanwhile.

Savers overwrite a checkpoint by exchanging it for another one, and readers are never locked out. So whoever
reads compares at the end whether the same still is there. Restores do it by this, and so does every tool.
"""

from __future__ import annotations

__all__ = ("MOST_READS", "Reading", "read_unchanged", "reading")

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Final, TypeVar, final

from penstock.handlers.stores.publishing.snapshots import Views, identity_now
from penstock.kernel.errors import CorruptCheckpointError, PenstockError, ReplacedError
from penstock.kernel.protocols.holds import take_hold
from penstock.kernel.protocols.stores import Hold, Store

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.protocols.coordinator import SharedReads

T = TypeVar("T")

MOST_READS: Final = 10
"""How many times a checkpoint is read again because it was replaced while it was being read."""


@final
class Reading:
    """One attempt to read what is at a path.

    Attributes:
        store: To read from: the one where it is, or what that learnt of it at once.
        identity: Its `Store.identity` before anything was read.
        replaced: What was raised because it was replaced; None so far.
        has_ended: Whether all was read. What fails then is not explained by a replacement.
    """

    __slots__ = ("_path", "_threads", "has_ended", "identity", "replaced", "store")

    def __init__(self, store: Store, threads: Threads, path: str, identity: object) -> None:
        self.store = store
        self._threads = threads
        self._path = path
        self.identity = identity
        self.replaced: ReplacedError | None = None
        self.has_ended = False

    async def check(self, because_of: PenstockError | None = None) -> None:
        """Raise if something else is at the path by now.

        Raises:
            ReplacedError: Then. What was read so far may be of either state.
        """
        if self.identity != await self._threads.run(identity_now, self.store, self._path):
            self.replaced = ReplacedError(self._path)
            raise self.replaced from because_of

    async def end(self) -> None:
        """Check for the last time: all was read, and what comes next, such as publishing it, is not judged.

        Raises:
            ReplacedError: As `check`.
        """
        await self.check()
        self.has_ended = True


@asynccontextmanager
async def reading(
    store: Store,
    threads: Threads,
    path: str,
    hold: Callable[[str], Hold] | None = None,
    views: Views | None = None,
    shared: SharedReads | None = None,
) -> AsyncGenerator[Reading]:
    """Hold what is at `path`, and compare at the end of the block whether it is still there.

    Args:
        store: Where it is.
        threads: For blocking calls.
        path: A file or a directory.
        hold: How it is held; by default against deletion, where that can be had, and without it elsewhere.
        views: Snapshots to read from, of a store that makes some; by default the store itself is read.
        shared: As for `Views.of`.

    Yields:
        The attempt. What is published is published after `Reading.end`.

    Raises:
        ReplacedError: If it was replaced before `Reading.end`, or before the end of the block. In place of
            any other `PenstockError` raised there.
    """
    held = await take_hold(store, threads, path, hold)
    try:
        viewed = nullcontext(store) if views is None else views.of(store, threads, path, shared)
        async with viewed as view:
            source = Reading(view, threads, path, await threads.run(view.identity, path))
            try:
                yield source
                if not source.has_ended:
                    await source.end()
            except PenstockError as error:
                if views is not None:
                    views.forget(view)  # the next attempt looks anew
                if not source.has_ended and source.replaced is None:
                    await source.check(error)

                raise
    finally:
        held.release()


async def read_unchanged(
    store: Store,
    threads: Threads,
    path: str,
    read: Callable[[Reading], Awaitable[T]],
    hold: Callable[[str], Hold] | None = None,
    views: Views | None = None,
    shared: SharedReads | None = None,
) -> T:
    """Return the result of `read`, which is called again if what is at `path` was replaced meanwhile.

    So no result mixes two checkpoints. While it reads, no penstock on this machine deletes what is there.

    Args:
        store: Where it is.
        threads: For blocking calls.
        path: A file or a directory.
        read: Has no effects before it calls `Reading.end`, which whatever publishes must do.
        hold: As for `reading`.
        views: As for `reading`.
        shared: As for `reading`, in the first attempt.

    Raises:
        ReplacedError: If it was replaced at every attempt.
    """
    may_repeat = store.over_network
    for _ in range(MOST_READS):
        source: Reading | None = None
        try:
            async with reading(store, threads, path, hold, views, shared) as source:
                return await read(source)
        except PenstockError as error:
            if source is None or source.has_ended:
                raise
            if source.replaced is None:
                if not may_repeat or not _may_be_of_the_way(error):
                    raise

                may_repeat, shared = False, None
                continue

        shared = None  # another process may have read what was replaced
        from penstock.kernel.events import get_logger  # the command line is quick without it

        get_logger().warning("restore.overtaken", path=path)

    raise ReplacedError(path, MOST_READS)


def _may_be_of_the_way(error: PenstockError) -> bool:
    """True if a document may have been damaged on its way here. Data is read again where it is compared."""
    return isinstance(error, CorruptCheckpointError) and error.stage != "read"
