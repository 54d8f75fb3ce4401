"""Views of a checkpoint that one operation reads: its store, or what the store learnt of it at once."""

from __future__ import annotations

__all__ = ("Views", "identity_now", "snapshot_of")

import errno
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from anyio import create_task_group

from penstock.kernel.errors import StorageError, ThrottledError, UnreachableError
from penstock.kernel.protocols.stores import ObjectStore, Snapshot

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads
    from penstock.kernel.protocols.coordinator import SharedReads
    from penstock.kernel.protocols.stores import Store

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
class Views:
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
        """Let whoever comes next make a new one: the checkpoint was replaced."""
        for key in [key for key, known in self._views.items() if known.store is view]:
            del self._views[key]


def identity_now(store: Store, path: str) -> object:
    """Return the identity that a checkpoint has now, also if `store` is a snapshot of it. Blocking."""
    return store.identity_now() if isinstance(store, Snapshot) else store.identity(path)


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
    """Return the snapshot that another process of the job told, or a new one, and tell that."""
    if shared is None:
        return await _snapshot(store, threads, path)

    turn, told = await shared.turn(path)
    if told is not None:
        found = await threads.run(store.told_snapshot, path, told)
        if found is not None and await threads.run(found.is_current):
            return found

    data = b""
    try:
        view = await _snapshot(store, threads, path)
        if turn and isinstance(view, Snapshot):
            data = await threads.run(view.told)
    finally:
        await shared.tell(turn, data)  # also of a failure, so that nobody waits for it

    return view


async def _snapshot(store: ObjectStore, threads: Threads, path: str) -> Store:
    """Return a snapshot of the checkpoint at `path`; the store itself if it makes none of that."""
    try:
        snapshot = await threads.run(store.snapshot, path)
        for _ in range(_TRIES):
            if snapshot is None:
                break

            await _side_by_side(threads, snapshot.reads())
            following = await threads.run(snapshot.settle)
            if following is None:
                return snapshot

            snapshot = following
    except (ThrottledError, UnreachableError):
        raise
    except StorageError:
        pass  # it went meanwhile, or may not be listed: a read of it says what is wrong

    return store


async def _side_by_side(threads: Threads, reads: Sequence[Callable[[], None]]) -> None:
    """Call all of them in threads. The first that fails ends the others, and is raised by itself."""
    failed: list[StorageError] = []

    async def call(read: Callable[[], None]) -> None:
        try:
            await threads.run(read)
        except StorageError as error:
            failed.append(error)
            reading.cancel_scope.cancel()

    async with create_task_group() as reading:
        for read in reads:
            reading.start_soon(call, read)

    if failed:
        raise failed[0]
