"""A bucket in memory, and a client of it that fails at a chosen request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from penstock.handlers.stores.buckets import connections
from penstock.handlers.stores.buckets.bucket_builds import Builds
from penstock.handlers.stores.buckets.bucket_store import BucketStore
from penstock.handlers.stores.buckets.object_client import ObjectClient
from penstock.kernel.concurrency.process_identity import ProcessIdentity

URL = "s3://bucket"


@dataclass
class Bucket:
    """Objects in memory, behind obstore's own client."""

    objects: Any = field(
        default_factory=lambda: pytest.importorskip("obstore.store", reason="needs obstore").MemoryStore()
    )

    def client(self) -> ObjectClient:
        return ObjectClient(URL, lambda _: self.objects)

    def store(self, file_bytes: int = 2**20) -> BucketStore:
        return BucketStore(URL, lambda _: self.objects, file_bytes=file_bytes)

    def objects_there(self) -> list[str]:
        return sorted(self.client().walk(""))

    def end_owner(self, key: str, **changed: str) -> None:
        """Make it look as if the process whose claim lies at a key had ended."""
        client = self.client()
        found = client.read(key)
        assert found is not None
        ended = replace(ProcessIdentity.mine(), began="1")
        client.put(key, json.dumps(json.loads(found[0]) | json.loads(ended.encode()) | changed).encode())


def bucket_of_every_url(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return a bucket that every URL leads to until the test ends."""
    made = Bucket()
    monkeypatch.setattr(connections, "connect", lambda name, options: lambda module: made.objects)
    return made


@dataclass
class Interposed:
    """An `ObjectClient` that does something before or instead of chosen requests.

    `instead` maps the name of a method to a function of the method itself and its arguments.
    """

    inner: ObjectClient
    instead: dict[str, Callable[..., Any]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if not callable(method):
            return method

        def call(*args: Any) -> Any:
            first = args[0] if args else ""
            self.calls.append(
                (name, first if isinstance(first, str) else ",".join(cast("Sequence[str]", first)))
            )
            found = self.instead.get(name)
            return method(*args) if found is None else found(method, *args)

        return call

    def builds(self) -> Builds:
        return Builds(cast("ObjectClient", self), "a store")
