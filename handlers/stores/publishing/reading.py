"""Reads a path from one of its states, although it may be replaced meanwhile.

Savers overwrite a checkpoint by exchanging it for another one, and readers are never locked out. So a reader
compares at the end whether the same still is there. Restores do it by this, and so does every tool. Of a
bucket they read a snapshot: what one request tells of all files (`Snapshots`).
"""

from __future__ import annotations

__all__ = ("MOST_READS", "Reading", "Snapshots", "read_unchanged", "reading", "snapshot_of")

import errno
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, final

from penstock.kernel.errors import (
    CorruptCheckpointError,
    PenstockError,
    ReplacedError,
    StorageError,
    ThrottledError,
    UnreachableError,
)
from penstock.kernel.pipeline.together import together
from penstock.kernel.protocols.stores import Hold, ObjectStore, Snapshot, Store, take_hold

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
        store = self.store
        look = store.identity_now if isinstance(store, Snapshot) else partial(store.identity, self._path)
        if self.identity != await self._threads.run(look):
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
    views: Snapshots | None = None,
    shared: SharedReads | None = None,
) -> AsyncGenerator[Reading]:
    """Hold what is at `path`, and compare at the end of the block whether it is still there.

    Args:
        store: Where it is.
        threads: For blocking calls.
        path: A file or a directory.
        hold: How it is held; by default against deletion, where that can be had, and without it elsewhere.
        views: Snapshots to read from, of a store that makes some; by default the store itself is read.
        shared: As for `Snapshots.of`.

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
    views: Snapshots | None = None,
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
    # A bit that flipped on the way is gone when the bytes are read again; one on a disk is not.
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
                if not may_repeat or not _may_be_a_read_error(error):
                    raise

                may_repeat, shared = False, None
                continue

        shared = None  # another process may have read what was replaced
        from penstock.kernel.events import get_logger  # the command line is quick without it

        get_logger().warning("restore.overtaken", path=path)

    raise ReplacedError(path, MOST_READS)


def _may_be_a_read_error(error: PenstockError) -> bool:
    """True if a document may have been damaged on its way here. Data is read again where it is compared."""
    return isinstance(error, CorruptCheckpointError) and error.stage != "read"


_MOST_LEFT: Final = 2
"""Each may hold some MiB."""
_TRIES: Final = 4
"""A checkpoint that is replaced so often while it is looked at is asked about one by one."""


@final
@dataclass(slots=True)
class _View:
    store: Store
    users: int = 0


@final
@dataclass(slots=True)
class Snapshots:
    """The snapshots that are in use, of each path one, and the last few that were. In one event loop.

    Operations that are part of one another, as the restores of items are of the restore of a step, read from
    one. Each of them compares the identity at its end, so it does not matter who made it. A snapshot that was
    left is taken up again if the checkpoint still has its identity: then one request tells all.
    """

    _views: dict[tuple[int, str], _View] = field(default_factory=dict[tuple[int, str], _View])
    _left: dict[tuple[int, str], Store] = field(default_factory=dict[tuple[int, str], "Store"])

    @asynccontextmanager
    async def of(
        self, store: Store, threads: Threads, path: str, shared: SharedReads | None = None
    ) -> AsyncGenerator[Store]:
        """Yield what to read the checkpoint at `path` from: a snapshot if the store makes some, or the store.

        Args:
            store: Where it is.
            threads: For blocking calls.
            path: Of the checkpoint.
            shared: How the processes of a job give each other what they read; None if each reads itself.

        Raises:
            StorageError: If the medium refuses.
        """
        objects = store.objects
        if isinstance(store, Snapshot) or objects is None:
            yield store
            return

        key = id(store), path
        view = self._views.get(key)
        if view is None:
            left = self._left.pop(key, None)
            is_current = isinstance(left, Snapshot) and await threads.run(left.is_current)
            found = left if left is not None and is_current else await _shared(objects, threads, path, shared)
            view = _View(found)
            if isinstance(found, Snapshot):
                self._views[key] = view

        view.users += 1
        try:
            yield view.store
        finally:
            view.users -= 1
            if not view.users and self._views.get(key) is view:
                del self._views[key]
                self._left[key] = view.store
                while len(self._left) > _MOST_LEFT:
                    del self._left[next(iter(self._left))]

    def forget(self, view: Store) -> None:
        """Let the next reader make a new one: the checkpoint was replaced."""
        for key in [key for key, known in self._views.items() if known.store is view]:
            del self._views[key]


def snapshot_of(store: Store, path: str) -> Store:
    """Return what to look at the checkpoint at `path` by: a snapshot, or the store. Blocking.

    Raises:
        StorageError: If the medium refuses.
    """
    snapshot: Snapshot | None = None if store.objects is None else store.objects.snapshot(path)
    for _ in range(_TRIES):
        if snapshot is None:
            break

        for read in snapshot.reads():
            read()

        try:
            following = snapshot.settle()
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise

            break  # it is gone

        if following is None:
            return snapshot

        snapshot = following

    return store


async def _shared(store: ObjectStore, threads: Threads, path: str, shared: SharedReads | None) -> Store:
    """Return the snapshot that another process of the job announced, or a new one, and announce that."""
    if shared is None:
        return await _snapshot(store, threads, path)

    turn, announced = await shared.turn(path)
    if announced is not None:
        found = await threads.run(store.shared_snapshot, path, announced)
        if found is not None and await threads.run(found.is_current):
            return found

    data = b""
    try:
        view = await _snapshot(store, threads, path)
        if turn and isinstance(view, Snapshot):
            data = await threads.run(view.encoded)
    finally:
        await shared.tell(turn, data)  # also of a failure, so that no process waits for it

    return view


async def _snapshot(store: ObjectStore, threads: Threads, path: str) -> Store:
    """Return a snapshot of the checkpoint at `path`; the store itself if it makes none of that."""
    try:
        snapshot = await threads.run(store.snapshot, path)
        for _ in range(_TRIES):
            if snapshot is None:
                break

            await together([partial(threads.run, read) for read in snapshot.reads()])
            following = await threads.run(snapshot.settle)
            if following is None:
                return snapshot

            snapshot = following
    except (ThrottledError, UnreachableError):
        raise
    except StorageError:
        pass  # it went meanwhile, or may not be listed: a read of it says what is wrong

    return store
