"""The few requests that a bucket is used by, over obstore. Every method blocks, without the GIL."""

from __future__ import annotations

__all__ = ("ObjectClient",)

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from threading import Lock
from typing import Any, Final, cast, final

from penstock.handlers.stores.buckets.object_errors import NO_BUCKET, WITHIN_SUCCESS, translated
from penstock.handlers.stores.buckets.objects import Created, Listed, Stat, same_content
from penstock.kernel.errors import MissingExtraError, StorageError, ThrottledError, UnreachableError

EXTRA: Final = "cloud"
WAITS_S: Final = (0.1, 0.4, 1.6)
"""Between tries to create an object whose outcome is not known, or that another request is in the way of."""

_PART_BYTES: Final = 5 * 2**20
"""The least that a part of an upload may have, but for the last one."""
_PARTS_AT_ONCE: Final = 4
_AT_ONCE: Final = 1000
"""Keys that one request deletes."""


@final
class ObjectClient:
    """Objects under the keys of one bucket.

    Args:
        url: Of the bucket, as `s3://bucket`; errors name objects by it.
        connect: Returns the client of obstore. Called once, by the first request.

    Raises:
        MissingExtraError: By the first request, if obstore is not installed.
        StorageError: By any request. It names the object and says what the server said.
    """

    __slots__ = ("_connect", "_lock", "_made", "_no_tag", "_tag", "url", "uses_conditions")

    def __init__(self, url: str, connect: Callable[[Any], Any]) -> None:
        self.url = url
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

    def head(self, key: str) -> Stat | None:
        """Return an object's properties; None if there is no such object."""
        obstore, store = self._client()
        try:
            with translated("head", self.path(key)):
                found = obstore.head(store, key)
        except StorageError as error:
            _check_absent(error)
            return None

        return Stat(found["size"], found[self._tag], found["last_modified"])

    def read(self, key: str) -> tuple[bytes, str | None] | None:
        """Return an object's content and its tag; None if there is no such object."""
        obstore, store = self._client()
        try:
            with translated("get", self.path(key)):
                found = obstore.get(store, key)
                return bytes(found.bytes()), found.meta[self._tag]
        except StorageError as error:
            _check_absent(error)
            return None

    def read_range(self, key: str, start: int, nbytes: int) -> memoryview:
        """Return bytes of an object, from `start` on; fewer than asked for if it ends before."""
        obstore, store = self._client()
        with translated("get", self.path(key)):
            return memoryview(obstore.get_range(store, key, start=start, length=nbytes))

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object, whatever was there before."""
        obstore, store = self._client()
        with translated("put", self.path(key)):
            obstore.put(store, key, data, use_multipart=False)

    def create(self, key: str, data: bytes | memoryview) -> Created:
        """Write an object that must be new. Of several who try at once, one succeeds.

        A reply that was lost is no failure: what lies there is compared with what was to be written.

        Raises:
            StorageError: If it is not known what lies there after all tries.
        """
        if not self.uses_conditions:
            there = self.read(key)
            if there is None:
                self.put(key, data)
                return "created"

            return "same" if there[0] == data else "other"

        obstore, store = self._client()
        for wait_s in (*WAITS_S, None):
            try:
                with translated("create", self.path(key)):
                    obstore.put(store, key, data, mode="create", use_multipart=False)
            except (ThrottledError, UnreachableError):
                if wait_s is None:
                    raise
            except StorageError as error:
                if error.errno != errno.EEXIST:
                    raise

                found = self.read(key)
                if found is not None:
                    return "same" if found[0] == data else "other"
                if wait_s is None:
                    raise
            else:
                return "created"

            time.sleep(wait_s)

        raise AssertionError("the last try returns or raises")

    def swap(self, key: str, data: bytes, tag: str) -> str | None:
        """Replace an object if it still has the tag; return its new one, or None if it has another.

        Args:
            key: Of the object.
            data: Differs from everything that was ever written there, so that a lost reply can be told.
            tag: As it was read.
        """
        if not self.uses_conditions:
            there = self.head(key)
            if there is None or there.tag != tag:
                return None

            self.put(key, data)
            written_there = self.head(key)
            return written_there and written_there.tag

        obstore, store = self._client()
        try:
            with translated("swap", self.path(key)):
                written = obstore.put(store, key, data, mode={self._tag: tag}, use_multipart=False)
        except StorageError as error:
            if error.errno not in {errno.ESTALE, errno.ENOENT, errno.EEXIST}:
                raise

            found = self.read(key)
            return found[1] if found is not None and found[0] == data else None

        return cast("str | None", written[self._tag])

    def put_parts(self, key: str, parts: Iterator[memoryview]) -> None:
        """Write an object of any length, by an upload in parts, which is aborted if anything fails.

        A few parts are on their way at once. Each is sent again as other requests are.
        """
        obstore, store = self._client()
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
        """What Amazon copies by one request."""
        return 5 * 2**30 if self.url.startswith("s3://") else None

    def copy_if_absent(self, source: str, destination: str) -> Created:
        """Copy an object within the bucket to where nothing lies.

        A reply that was lost is no failure: what lies there is compared with what was to be copied.
        """
        if not self.uses_conditions:
            if self.head(destination) is not None:
                return "same" if same_content(self, source, destination) else "other"

            self.copy(source, destination)
            return "created"

        obstore, store = self._client()
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

            time.sleep(wait_s)

        raise AssertionError("the last try returns or raises")

    def copy(self, source: str, destination: str) -> None:
        """Copy an object within the bucket, without its bytes passing through here."""
        obstore, store = self._client()
        with translated("copy", self.path(source)):
            obstore.copy(store, source, destination, overwrite=True)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        obstore, store = self._client()
        for at in range(0, len(keys), _AT_ONCE):
            some = keys[at : at + _AT_ONCE]
            try:
                with translated("delete", self.path(some[0])):
                    obstore.delete(store, list(some))
            except StorageError as error:
                _check_absent(error)  # Azure says so of one, and may have gone no further
                for key in some:
                    self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        obstore, store = self._client()
        try:
            with translated("delete", self.path(key)):
                obstore.delete(store, key)
        except StorageError as error:
            _check_absent(error)

    def list(self, prefix: str) -> Listed:
        """Name what lies right below a prefix, which may be empty for the whole bucket."""
        obstore, store = self._client()
        with translated("list", self.path(prefix)):
            found = obstore.list_with_delimiter(store, prefix=prefix or None)

        folders = [str(name).rstrip("/").rsplit("/", 1)[-1] for name in found["common_prefixes"]]
        names = [str(each["path"]).rsplit("/", 1)[-1] for each in found["objects"]]
        return Listed(folders, names, [int(each["size"]) for each in found["objects"]])

    def walk(self, prefix: str) -> Iterator[str]:
        """Yield the key of every object below a prefix, at any depth."""
        obstore, store = self._client()
        with translated("list", self.path(prefix)):
            for some in obstore.list(store, prefix=prefix or None):
                yield from (str(each["path"]) for each in some)

    def has_below(self, prefix: str) -> bool:
        """Whether any object lies below a prefix."""
        obstore, store = self._client()
        with translated("list", self.path(prefix)):
            return any(bool(some) for some in obstore.list(store, prefix=prefix or None, chunk_size=1))

    def keeps_conditions(self, key: str, data: bytes) -> bool:
        """Whether the server refuses to create what is there, and to replace what has another tag.

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
                with translated("create", self.path(key)):
                    obstore.put(store, key, data, mode=mode, use_multipart=False)
            except StorageError as error:
                if error.errno != expected:
                    raise
            else:
                return False

        return True

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


_NO_TAG: Final = '"00000000000000000000000000000000"'
_NO_GENERATION: Final = "1"


def _check_absent(error: StorageError) -> None:
    """Return if nothing lies there; raise for any other failure."""
    if error.errno != errno.ENOENT or error.problem == NO_BUCKET:
        raise error
