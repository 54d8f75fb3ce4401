"""The objects that a long file in a bucket is made of, and how it comes to its key."""

from __future__ import annotations

__all__ = ("BucketScratch",)

import errno
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final, final

from penstock.handlers.stores.buckets.bucket_builds import Build, Builds, staging
from penstock.handlers.stores.buckets.object_errors import WITHIN_SUCCESS
from penstock.handlers.stores.buckets.objects import Objects
from penstock.kernel.errors import StorageError

_TRIES: Final = 3
"""Of an upload that the server ends with an error which the client does not understand."""


@final
class BucketScratch:
    """Keeps objects beside the prefix that is claimed, where they are no part of any checkpoint.

    What ends a save removes them, and so does whoever takes its claim over. The file itself is uploaded in
    parts, to such a place, too: only a copy by the server can be made on condition that nothing is there.

    Args:
        client: Of the bucket.
        builds: Of the same.
        build: The save that the file belongs to; None if it belongs to none.
        key: Of the file.
        uploading: Held while parts are uploaded: those of one file at a time are in memory.
    """

    __slots__ = ("_build", "_builds", "_client", "_key", "_place", "_uploading")

    def __init__(
        self, client: Objects, builds: Builds, build: Build | None, key: str, uploading: Lock
    ) -> None:
        self._client, self._builds, self._build, self._key = client, builds, build, key
        above = staging(key, uuid.uuid4().hex) if build is None else build.staging
        self._place = f"{above}/{uuid.uuid4().hex}"
        self._uploading = uploading

    def path(self, key: str) -> str:
        return self._client.path(key)

    def put(self, number: int, data: memoryview) -> str:
        key = f"{self._place}/{number}"
        if self._build is None:
            self._client.put(key, data)
        else:
            self._builds.create(self._build, key, data)

        return key

    def read(self, key: str, start: int, nbytes: int) -> memoryview:
        return self._client.read_range(key, start, nbytes)

    def finish(self, parts: Callable[[], Iterator[memoryview]], nbytes: int) -> None:
        build = self._build
        if build is not None and build.file is not None:  # its key is this save's alone
            self._note(self._key)
            self._upload(self._key, parts, nbytes)
            return

        whole = f"{self._place}/whole"
        self._note(whole)
        self._upload(whole, parts, nbytes)
        try:
            self._publish(whole)
        finally:
            with suppress(StorageError):  # the end of the save removes what is left
                self.remove([whole])

    def remove(self, keys: Sequence[str]) -> None:
        self._client.delete(keys)
        if self._build is not None:
            with self._build.lock:
                self._build.created.difference_update(keys)

    def _upload(self, key: str, parts: Callable[[], Iterator[memoryview]], nbytes: int) -> None:
        """Upload a file to a key that nobody else has.

        So if a file of that length is there, all parts are, and only the reply to the last request was lost.
        """
        with self._uploading:
            for left in range(_TRIES - 1, -1, -1):
                try:
                    self._client.put_parts(key, self._renewing(parts()))
                except StorageError as error:
                    found = self._client.head(key)
                    if found is not None and found.size == nbytes:
                        return
                    if error.problem != WITHIN_SUCCESS or not left:
                        raise
                else:
                    return

    def _renewing(self, parts: Iterator[memoryview]) -> Iterator[memoryview]:
        """Pass the parts on, and renew the claim between them: an upload may take longer than its lease."""
        for part in parts:
            if self._build is not None:
                self._builds.keep(self._build)

            yield part

    def _publish(self, whole: str) -> None:
        """Let the file have its key, unless something else has it."""
        created = self._client.copy_if_absent(whole, self._key)
        if created == "other":
            raise StorageError("create", self.path(self._key), "is there with another content", errno.EEXIST)
        if self._build is not None:
            with self._build.lock:
                (self._build.created if created == "created" else self._build.met).add(self._key)

    def _note(self, key: str) -> None:
        if self._build is not None:
            with self._build.lock:
                self._build.created.add(key)
