"""A bucket in memory, and a client of it that fails at a chosen request."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import pytest

from penstock.handlers.stores.buckets import connections
from penstock.handlers.stores.buckets.bucket_builds import Builds
from penstock.handlers.stores.buckets.bucket_claims import Claims
from penstock.handlers.stores.buckets.bucket_store import BucketStore
from penstock.handlers.stores.buckets.object_client import ObjectClient
from penstock.handlers.stores.buckets.objects import Stat
from penstock.kernel.concurrency.process_identity import ProcessIdentity, ThisProcess

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

    def builds(self) -> Builds:
        """Return builds of this process, through a client of their own."""
        client = self.client()
        return Builds(client, Claims(client, "a store"))

    def objects_there(self) -> list[str]:
        return sorted(self.client().walk(""))

    def end_owner(self, key: str, **changed: str) -> None:
        """Make it look as if the process whose claim lies at a key had ended."""
        client = self.client()
        found = client.read(key)
        assert found is not None
        ended = replace(ProcessIdentity.mine(), began="1")
        changed = {"process": "an ended one", **changed}
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
        client = cast("ObjectClient", self)
        return Builds(client, Claims(client, "a store"))


@dataclass
class Machine:
    """A machine with one process that uses a bucket, and a clock. The server's clock is that of the bucket.

    It cannot see whether a process of another machine has ended.
    """

    name: str
    bucket: Bucket
    clocks: dict[str, float]  #: how far each clock has gone on by the test's will: the server's is `server`
    lease_s: float = 90.0
    process: ThisProcess = field(init=False)
    client: Interposed = field(init=False)
    builds: Builds = field(init=False)

    def __post_init__(self) -> None:
        self.clocks.setdefault(self.name, 0.0)
        self.process = ThisProcess()
        elsewhere = {"boot": self.name, "machine": self.name, "namespace": self.name, "host": self.name}
        self.process.identity = replace(self.process.identity, **elsewhere)
        self.client = Interposed(self.bucket.client(), {"head": self._head})
        self.restart_store()

    def restart_store(self) -> None:
        """Let the process make another store object."""
        client = cast("ObjectClient", self.client)
        claims = Claims(
            client,
            self.name,
            lease_s=self.lease_s,
            process=self.process,
            clock=lambda: self.clocks[self.name],
        )
        self.builds = Builds(client, claims)

    def _head(self, method: Callable[[str], Stat | None], key: str) -> Stat | None:
        """Have the server say that what is written now, as its time is asked for, was written that late."""
        found = method(key)
        if found is None or not key.endswith(".clock"):
            return found

        return replace(found, modified=found.modified + timedelta(seconds=self.clocks["server"]))
