"""The store of a path."""

from __future__ import annotations

__all__ = ("StoreFinder", "store_at")

from collections.abc import Sequence
from threading import Lock
from typing import final

from penstock.handlers.stores.local import LocalStore
from penstock.kernel.config.config import Config, StoreOptions
from penstock.kernel.protocols.store_capabilities import Leases
from penstock.kernel.protocols.stores import Store
from penstock.kernel.storage.paths import BUCKETS, bucket_of


@final
class StoreFinder:
    """The store that a caller gave, for every path; or the local one and one for each bucket. Thread-safe.

    Args:
        given: The caller's; None for those that paths ask for.
        options: For the others.
    """

    __slots__ = ("_buckets", "_is_given", "_lock", "_options", "default")

    def __init__(self, given: Store | None, options: StoreOptions) -> None:
        self.default = LocalStore(io=options.io, links=options.links) if given is None else given
        self._is_given = given is not None
        self._options = options
        self._lock = Lock()
        self._buckets: dict[str, Store] = {}

    @property
    def shortest_lease_s(self) -> float:
        """The least of the leases that any store has, or will have."""
        if isinstance(self.default, Leases):
            return self.default.lease_s

        return min([self._options.of_scheme(scheme).lease_s for scheme in BUCKETS])

    def leases(self) -> Sequence[Leases]:
        """Return the stores of now whose builds and holds are leases."""
        with self._lock:
            stores = (self.default, *self._buckets.values())

        return [store for store in stores if isinstance(store, Leases)]

    def at(self, path: str) -> Store:
        """Return the store of an absolute path or a URL. Quick; connects to nothing."""
        bucket = None if self._is_given else bucket_of(path)
        if bucket is None:
            return self.default

        scheme, name = bucket
        url = f"{scheme}://{name}"
        with self._lock:
            if url not in self._buckets:
                # Here, because local paths need nothing of it.
                from penstock.handlers.stores.buckets.bucket_store import BucketStore
                from penstock.handlers.stores.buckets.connections import connect, tensorstore_spec

                options = self._options.of_scheme(scheme)
                self._buckets[url] = BucketStore(
                    url,
                    connect(name, options),
                    file_bytes=options.file_bytes,
                    single_writer=options.single_writer,
                    lease_s=options.lease_s,
                    tensorstore=tensorstore_spec(name, options),
                )

            return self._buckets[url]


def store_at(path: str) -> Store:
    """Return the store of an absolute path or a URL, as the configuration says. Connects to nothing."""
    return LocalStore() if bucket_of(path) is None else StoreFinder(None, Config.load().store).at(path)
