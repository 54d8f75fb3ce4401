"""A bucket in memory, and a client of it that fails at a chosen request."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import pytest

from penstock.errors import OutcomeUnknownError, StorageError
from penstock.handlers.stores.buckets import connections
from penstock.handlers.stores.buckets.bucket_builds import Build, Builds
from penstock.handlers.stores.buckets.bucket_claims import Claims
from penstock.handlers.stores.buckets.bucket_store import BucketStore
from penstock.handlers.stores.buckets.object_client import ObjectClient
from penstock.handlers.stores.buckets.objects import Stat
from penstock.handlers.stores.publishing import ProcessIdentity, ThisProcess

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
class ServerClock:
    """The clock of a bucket's server, which a test moves on."""

    seconds: float = 0.0  #: ahead of what the bucket in memory says
    written: dict[str, float] = field(
        default_factory=dict[str, float]
    )  #: by key, the clock when it was written

    def write(self, method: Callable[..., Any], key: str, *arguments: Any) -> Any:
        before, self.written[key] = self.written.get(key, 0.0), self.seconds
        done = method(key, *arguments)
        if done == "other" or (method.__name__ == "swap" and done is None):
            self.written[key] = before

        return done

    def head(self, method: Callable[[str], Stat | None], key: str) -> Stat | None:
        found = method(key)
        if found is None:
            return None

        return replace(found, modified=found.modified + timedelta(seconds=self.written.get(key, 0.0)))


@dataclass
class Machine:
    """A machine with one process that uses a bucket. It cannot see which processes of others have ended."""

    name: str
    bucket: Bucket
    server: ServerClock
    seconds: float = 0.0  #: its own clock
    lease_s: float = 90.0
    before: Callable[[str, str], object] = lambda _name, _key: None
    """Called before each request that changes something, with its name and the key."""
    process: ThisProcess = field(init=False)
    builds: Builds = field(init=False)

    def __post_init__(self) -> None:
        self.process = ThisProcess()
        name = self.name
        self.process.identity = replace(
            self.process.identity, boot=name, machine=name, namespace=name, host=name
        )
        self.make_store()

    def make_store(self) -> None:
        """Let the process make another store object."""

        def change(name: str) -> Callable[..., Any]:
            def call(method: Callable[..., Any], key: Any, *arguments: Any) -> Any:
                self.before(name, key if isinstance(key, str) else ",".join(key))
                if name == "delete":
                    return method(key)

                return self.server.write(method, key, *arguments)

            return call

        instead = {name: change(name) for name in ("create", "swap", "put", "delete")}
        client = cast("ObjectClient", Interposed(self.bucket.client(), {**instead, "head": self.server.head}))
        claims = Claims(
            client, self.name, lease_s=self.lease_s, process=self.process, clock=lambda: self.seconds
        )
        self.builds = Builds(client, claims)

    def save(self, key: str = "run/7") -> str:
        """Save two files that hold its name; return how that ended."""
        build: Build | None = None
        try:
            build = self.builds.begin(key, f"place of {self.name}", None)
            for name in ("a", "b"):
                if self.builds.create(build, f"{key}/{name}", self.name.encode()) == "other":
                    raise StorageError("create", key, "is there with another content", errno.EEXIST)  # noqa: TRY301  # as the store does

            self.builds.publish(build)
        except StorageError as error:
            if build is not None:
                with suppress(StorageError):
                    self.builds.discard(build)

            return type(error).__name__
        except OutcomeUnknownError:
            return "OutcomeUnknownError"

        return "saved"
