"""The store of a path."""

from __future__ import annotations

__all__ = ("StoreFinder", "store_at", "store_of")

import os
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Final, cast, final

import anyio

from penstock.config.files import has_options
from penstock.handlers.stores.local import LocalStore
from penstock.handlers.stores.publishing.paths import path_or_url, root_of, scheme_of
from penstock.handlers.stores.publishing.reading import snapshot_of
from penstock.kernel.errors import PathError, SpecError
from penstock.kernel.protocols.stores import Store
from penstock.kernel.registry import SCHEMES

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from penstock.config.config import StoreOptions
    from penstock.kernel.concurrency.threads import Threads

_PER_LEASE: Final = 3
"""Renewals. Two of them may fail before a lease is over."""


@final
class StoreFinder:
    """The store that a caller gave, for every path; or the local one and one for each bucket. Thread-safe.

    Args:
        given: The caller's; None for those that paths ask for.
        options: For the others.

    Raises:
        SpecError: If what the caller gave is no store.
    """

    __slots__ = ("_buckets", "_lock", "_options", "default", "is_given")

    def __init__(self, given: Store | None, options: StoreOptions) -> None:
        # A caller without a type checker may give anything.
        if given is not None and not isinstance(cast("object", given), Store):
            raise SpecError(f"store={given!r} is no penstock.kernel.Store: derive its class from that")

        self.default = LocalStore(io=options.io, links=options.links) if given is None else given
        self.is_given = given is not None  #: whether the caller gave one, which no other process has
        self._options = options
        self._lock = Lock()
        self._buckets: dict[str, Store] = {}

    @property
    def shortest_lease_s(self) -> float:
        """The least of the leases that any store has, or will have."""
        objects = self.default.objects
        return self._options.shortest_lease_s if objects is None else objects.lease_s

    @contextmanager
    def renewing_leases(self, tasks: TaskGroup) -> Generator[None]:
        """Renew builds and holds that are leases, three times in each lease, while the body runs.

        While the event loop stands still nothing is renewed. That is safe: of who was taken over, the next
        swap fails, before anything is published or deleted. At the end a request under way is waited for.
        """
        scope = anyio.CancelScope()
        from penstock.kernel.concurrency.threads import Threads  # what only looks at a store has no threads

        threads = Threads(1)  # apart from the others: eight long uploads must not keep a renewal waiting
        interval_s = self.shortest_lease_s / _PER_LEASE

        async def renew() -> None:
            with scope:
                while True:
                    await anyio.sleep(interval_s)
                    with self._lock:
                        stores = (self.default, *self._buckets.values())

                    for store in stores:
                        if store.objects is not None:
                            await threads.run(store.objects.renew_leases)

        tasks.start_soon(renew, name="penstock leases")
        try:
            yield
        finally:
            scope.cancel()

    async def close(self, threads: Threads) -> None:
        """Have the stores that were made here close what they do not use; they can be used again.

        A Checkpointer is part of cycles, and until they are collected its stores would keep that.
        """
        with self._lock:
            stores = tuple(self._buckets.values())

        with anyio.CancelScope(shield=True):  # bounded: no store asks its server for that
            for store in stores:
                await threads.run(store.close)

    def at(self, path: str) -> Store:
        """Return the store of an absolute path or a URL. Quick; connects to nothing."""
        if self.is_given or path.startswith("/"):
            return self.default

        url = root_of(path)
        with self._lock:
            if url not in self._buckets:
                scheme = url.partition("://")[0]
                found = SCHEMES.find(scheme)
                if found is None:  # it was there when the path was looked at
                    raise PathError(path, f"is in a {scheme}:// store, and nothing says how to open one")

                self._buckets[url] = found.open(url, self._options.of_scheme(scheme))

            return self._buckets[url]


def store_at(path: str, *, snapshot: bool = False) -> Store:
    """Return the store of an absolute path or a URL, as the configuration says.

    Args:
        path: What is read or written there.
        snapshot: Whether to return a snapshot of the checkpoint at `path`, if it is in a bucket. That blocks;
            otherwise nothing is connected to.

    Raises:
        StorageError: If the medium refuses a snapshot.
    """
    if scheme_of(path) is None:
        return LocalStore()

    store = _configured().at(path)
    return snapshot_of(store, path) if snapshot else store


def store_of(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Return the store of a path on the command line, as the configuration says, and the full path."""
    final_path = path_or_url(path)
    if scheme_of(final_path) is None and not has_options(os.environ):
        return LocalStore(), final_path

    return _configured().at(final_path), final_path


def _configured() -> StoreFinder:
    from penstock.config.config import Config  # it loads the options of all else, too

    return StoreFinder(None, Config.load().store)
