"""The few requests that a bucket is used by, over obstore. Every method blocks, without the GIL."""

from __future__ import annotations

__all__ = ("ObjectClient",)

import errno
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from threading import Lock
from typing import Any, Final, TypeVar, cast, final

from penstock.handlers.stores.buckets.connections import Connection
from penstock.handlers.stores.buckets.object_errors import NO_BUCKET, WITHIN_SUCCESS, translated
from penstock.handlers.stores.buckets.objects import (
    Created,
    ListedObject,
    Listing,
    ObjectContent,
    Stat,
    same_content,
)
from penstock.handlers.stores.buckets.retries import RetriedRequests, RetryPolicy, pause_in_thread
from penstock.kernel.errors import MissingExtraError, StorageError, ThrottledError
from penstock.kernel.protocols.stores import RequestFigures

T = TypeVar("T")

EXTRA: Final = "cloud"
WAITS_S: Final = (0.1, 0.4, 1.6)
"""Between tries to copy an object whose outcome is not known."""
_CONFLICTS: Final = 8
"""So often an object is created anew that is said to be there and is not."""

_PART_BYTES: Final = 5 * 2**20
"""The least that a part of an upload may have, but for the last one."""
# Several files are uploaded at once already.
_PARTS_AT_ONCE: Final = 4
_AT_ONCE: Final = 1000
"""Keys that one request deletes, or lists."""


@final
class ObjectClient:
    """Objects under the keys of one bucket.

    Args:
        url: Of the bucket, as `s3://bucket`; errors name objects by it.
        connect: Returns the client of obstore, which repeats nothing. Called once, by the first request. A
            `Connection` says how long requests are repeated here, and has a client that repeats what is many
            requests in one call.
        requests: Repeats requests; by default as long as the connection says.

    Raises:
        MissingExtraError: By the first request, if obstore is not installed.
        StorageError: By any request. It names the object and says what the server said.
    """

    __slots__ = (
        "_connect", "_lock", "_made", "_no_tag", "_patient", "_requests", "_tag", "url", "uses_conditions",
    )  # fmt: skip

    def __init__(
        self, url: str, connect: Callable[[Any], Any], requests: RetriedRequests | None = None
    ) -> None:
        self.url = url
        policy = connect.policy if isinstance(connect, Connection) else RetryPolicy()
        self._requests = RetriedRequests(policy) if requests is None else requests
        self._patient: Any = None
        self._connect = connect
        # Google compares the generation of an object, and others its tag.
        by_version = url.startswith("gs://")
        self._tag, self._no_tag = ("version", _NO_GENERATION) if by_version else ("e_tag", _NO_TAG)
        self._lock = Lock()
        self._made: tuple[Any, Any] | None = None
        self.uses_conditions = True
        """Whether the server decides if an object is new or unchanged. If not, it is looked at before it is
        written, and who writes it meanwhile is written over."""

    def path(self, key: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{key}" if key else self.url

    def figures(self) -> RequestFigures:
        """Return how many requests were sent so far, and what became of them."""
        return self._requests.figures()

    def head(self, key: str) -> Stat | None:
        """Return an object's properties; None if there is no such object."""
        obstore, store = self._client()
        try:
            found = self._send("head", key, lambda: obstore.head(store, key))
        except StorageError as error:
            _check_absent(error)
            return None

        return Stat(found["size"], found[self._tag], found["last_modified"])

    def read(self, key: str) -> ObjectContent | None:
        """Return an object's content and its tags; None if there is no such object."""
        return self._read(key)

    def _read(self, key: str, *, paced: bool = True, within_s: float | None = None) -> ObjectContent | None:
        obstore, store = self._client()

        def get() -> ObjectContent:
            found = obstore.get(store, key)
            return ObjectContent(bytes(found.bytes()), found.meta[self._tag], _plain_tag(found.meta["e_tag"]))

        try:
            return self._send("get", key, get, paced=paced, within_s=within_s)
        except StorageError as error:
            _check_absent(error)
            return None

    def read_range(self, key: str, start: int, nbytes: int) -> memoryview:
        """Return bytes of an object, from `start` on; fewer than asked for if it ends before."""
        obstore, store = self._client()
        return memoryview(
            self._send("get", key, lambda: obstore.get_range(store, key, start=start, length=nbytes))
        )

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object, whatever was there before."""
        obstore, store = self._client()
        self._send("put", key, lambda: obstore.put(store, key, data, use_multipart=False))

    def create(self, key: str, data: bytes | memoryview) -> Created:
        """Write an object that must be new. Of several who try at once, one succeeds.

        A reply that was lost is no failure: what is there is compared with what was to be written.

        Raises:
            StorageError: If it is not known what is there after all tries.
        """
        if not self.uses_conditions:
            there = self.read(key)
            if there is None:
                self.put(key, data)
                return "created"

            return "same" if there.data == data else "other"

        obstore, store = self._client()
        n_conflicts = 0

        def create() -> Created:
            nonlocal n_conflicts
            try:
                with translated("create", self.path(key)):
                    obstore.put(store, key, data, mode="create", use_multipart=False)
            except StorageError as error:
                if error.errno != errno.EEXIST:
                    raise

                # Perhaps by a try of ours, whose reply was lost or came too late.
                found = self.read(key)
                if found is not None:
                    return "same" if found.data == data else "other"
                n_conflicts += 1
                if n_conflicts >= _CONFLICTS:
                    raise

                raise ThrottledError("create", self.path(key), "another request is in the way") from error

            return "created"

        return self._requests.send("create", self.path(key), create)

    def swap(self, key: str, data: bytes, tag: str, within_s: float | None = None) -> str | None:
        """Replace an object if it still has the tag; return its new one, or None if it has another.

        It does not wait its turn after other requests while the server refuses them: a claim is renewed so.

        Args:
            key: Of the object.
            data: Differs from everything that was ever written there, so that a lost reply is recognised.
            tag: As it was read.
            within_s: Less time than other requests are repeated for.
        """
        if not self.uses_conditions:
            there = self.head(key)
            if there is None or there.tag != tag:
                return None

            self.put(key, data)
            written_there = self.head(key)
            return written_there and written_there.tag

        obstore, store = self._client()

        def swap() -> str | None:
            written = obstore.put(store, key, data, mode={self._tag: tag}, use_multipart=False)
            return cast("str | None", written[self._tag])

        try:
            return self._send("swap", key, swap, paced=False, within_s=within_s)
        except StorageError as error:
            if error.errno not in {errno.ESTALE, errno.ENOENT, errno.EEXIST}:
                raise

            found = self._read(key, paced=False, within_s=within_s)
            return found.tag if found is not None and found.data == data else None

    def put_parts(self, key: str, parts: Iterator[memoryview]) -> None:
        """Write an object of any length, by an upload in parts, which is aborted if anything fails.

        A few parts are on their way at once. Each is sent again by the client itself.
        """
        obstore, store = self._patient_client()
        first = next(parts, memoryview(b""))
        with (
            translated("put", self.path(key)),
            obstore.open_writer(
                store, key, buffer_size=max(first.nbytes, _PART_BYTES), max_concurrency=_PARTS_AT_ONCE
            ) as writer,
        ):
            for part in chain([first], parts):
                writer.write(part)

    @property
    def most_copied(self) -> int | None:
        """The most that Amazon copies by one request."""
        return 5 * 2**30 if self.url.startswith("s3://") else None

    def copy_if_absent(self, source: str, destination: str) -> Created:
        """Copy an object within the bucket to where nothing is.

        A reply that was lost is no failure: what is there is compared with what was to be copied.
        """
        if not self.uses_conditions:
            if self.head(destination) is not None:
                return "same" if same_content(self, source, destination) else "other"

            self.copy(source, destination)
            return "created"

        obstore, store = self._patient_client()  # on S3 it is an upload in parts
        for wait_s in (*WAITS_S, None):
            try:
                with translated("copy", self.path(destination)):
                    obstore.copy(store, source, destination, overwrite=False)
            except StorageError as error:
                if error.errno in {errno.EEXIST, errno.ESTALE}:
                    return "same" if same_content(self, source, destination) else "other"
                if error.errno == errno.ENOENT and same_content(self, source, destination):
                    return "same"  # the copy in parts was made, so that it was not there when asked again
                if error.problem != WITHIN_SUCCESS or wait_s is None:
                    raise
            else:
                return "created"

            pause_in_thread(wait_s)

        raise AssertionError("the last try returns or raises")

    def copy(self, source: str, destination: str) -> None:
        """Copy an object within the bucket, without its bytes passing through here."""
        obstore, store = self._client()
        self._send("copy", source, lambda: obstore.copy(store, source, destination, overwrite=True))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        obstore, store = self._client()
        for at in range(0, len(keys), _AT_ONCE):
            some = list(keys[at : at + _AT_ONCE])
            try:
                self._send("delete", some[0], partial(obstore.delete, store, some))
            except StorageError as error:
                _check_absent(error)  # Azure says so of one, and may have gone no further
                for key in some:
                    self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        obstore, store = self._client()
        try:
            self._send("delete", key, lambda: obstore.delete(store, key))
        except StorageError as error:
            _check_absent(error)

    def list(self, prefix: str) -> Listing:
        """Name what is right below a prefix, which may be empty for the whole bucket."""
        obstore, store = self._client()
        found = self._send("list", prefix, lambda: obstore.list_with_delimiter(store, prefix=prefix or None))
        folders = [str(name).rstrip("/").rsplit("/", 1)[-1] for name in found["common_prefixes"]]
        names = [str(each["path"]).rsplit("/", 1)[-1] for each in found["objects"]]
        return Listing(folders, names, [int(each["size"]) for each in found["objects"]])

    def walk(self, prefix: str) -> Iterator[str]:
        """Yield the key of every object below a prefix, at any depth."""
        for some in self._pages(prefix, _AT_ONCE):
            yield from (str(each["path"]) for each in some)

    def entries(self, prefix: str) -> Iterator[Sequence[ListedObject]]:
        """Yield what is below a prefix, at any depth, by one request each time."""
        for some in self._pages(prefix, _AT_ONCE):
            yield [
                ListedObject(str(each["path"]), int(each["size"]), _plain_tag(each["e_tag"])) for each in some
            ]

    def has_below(self, prefix: str) -> bool:
        """True if any object is below a prefix."""
        return any(bool(some) for some in self._pages(prefix, 1))

    def _pages(self, prefix: str, length: int) -> Iterator[Sequence[Any]]:
        """Yield lists of what is below a prefix, none of it twice.

        obstore does not repeat a list that is cut off, and cannot go on with it. So that is begun anew.
        """
        obstore, store = self._client()
        known: set[str] = set()
        listing: Any = None

        def page() -> Sequence[Any] | None:
            nonlocal listing
            try:
                if listing is None:
                    listing = iter(obstore.list(store, prefix=prefix or None, chunk_size=length))

                return cast("Sequence[Any] | None", next(listing, None))
            except Exception:
                listing = None
                raise

        while (found := self._send("list", prefix, page)) is not None:
            fresh = [each for each in found if each["path"] not in known]
            known.update([each["path"] for each in fresh])
            if fresh:
                yield fresh
            if len(found) < length:
                return  # nothing follows, and to ask for it would count as a request

    def keeps_conditions(self, key: str, data: bytes) -> bool:
        """True if the server refuses to create what is there, and to replace what has another tag.

        Args:
            key: Of an object that is there.
            data: Its content, which stays in either case.
        """
        obstore, store = self._client()
        tries: list[tuple[object, int]] = [
            ("create", errno.EEXIST),
            ({self._tag: self._no_tag}, errno.ESTALE),
        ]
        for mode, expected in tries:
            try:
                self._send(
                    "create", key, partial(obstore.put, store, key, data, mode=mode, use_multipart=False)
                )
            except StorageError as error:
                if error.errno != expected:
                    raise
            else:
                return False

        return True

    def _send(
        self,
        operation: str,
        key: str,
        request: Callable[[], T],
        *,
        paced: bool = True,
        within_s: float | None = None,
    ) -> T:
        path = self.path(key)

        def attempt() -> T:
            with translated(operation, path):
                return request()

        return self._requests.send(operation, path, attempt, paced=paced, within_s=within_s)

    def _client(self) -> tuple[Any, Any]:
        with self._lock:
            if self._made is None:
                try:
                    obstore: Any = import_module("obstore")
                except ImportError as error:
                    raise MissingExtraError(self.url, EXTRA) from error

                with translated("connect", self.url):
                    self._made = obstore, self._connect(import_module("obstore.store"))

            return self._made

    def _patient_client(self) -> tuple[Any, Any]:
        """Return the client for calls that make many requests: it repeats each of them by itself."""
        obstore, store = self._client()
        if not isinstance(self._connect, Connection):
            return obstore, store

        with self._lock:
            if self._patient is None:
                with translated("connect", self.url):
                    self._patient = self._connect.patient(import_module("obstore.store"))

            return obstore, self._patient


def _plain_tag(tag: str | None) -> str | None:
    """Return an entity tag without quotes: Azure has them around it, but not in lists."""
    return None if tag is None else tag.strip('"')


_NO_TAG: Final = '"00000000000000000000000000000000"'
_NO_GENERATION: Final = "1"


def _check_absent(error: StorageError) -> None:
    """Return if nothing is there; raise for any other failure."""
    if error.errno != errno.ENOENT or error.problem == NO_BUCKET:
        raise error
