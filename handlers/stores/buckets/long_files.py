"""A file of any length in a bucket, written in any order and put together in the end.

An upload in parts takes them in the order of the file alone, and the first bytes of a file may be known last:
those of safetensors hold the checksums of all others. So what is written goes into its own objects, as it
comes. When all is there, it is read back in the order of the file, compared with its checksums, and uploaded.
"""

from __future__ import annotations

__all__ = (
    "BucketScratch",
    "Bytes",
    "FileRun",
    "LongFile",
    "ObjectBuffer",
    "Scratch",
    "StoredRuns",
    "kept",
)

import errno
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Final, NamedTuple, Protocol, TypeAlias, final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from penstock.handlers.stores.buckets.bucket_builds import Build, Builds, staging
from penstock.handlers.stores.buckets.bucket_files import new_bytes
from penstock.handlers.stores.buckets.object_errors import WITHIN_SUCCESS
from penstock.handlers.stores.buckets.objects import Objects
from penstock.kernel.concurrency.threads import end_if_cancelled
from penstock.kernel.errors import ChecksumError, StorageError
from penstock.kernel.protocols.stores import Transfers

Bytes: TypeAlias = NDArray[np.uint8]


class FileRun(NamedTuple):
    """Bytes that follow each other in the file, and where they are."""

    offset: int  #: in the file
    at: int  #: among the bytes that they were gathered with
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class StoredRuns:
    """The bytes of one stretch of the file that are together in one place."""

    source: str | Bytes  #: the key of an object, or bytes that are still here
    start: int  #: in the source
    nbytes: int
    crc32c: int
    offsets: NDArray[np.int64]  #: of its runs in the file; the runs are one after another in the source
    lengths: NDArray[np.int64]


@final
class ObjectBuffer:
    """Bytes that are collected until they fill an object.

    Args:
        nbytes: Of an object.
    """

    __slots__ = ("_data", "_used", "runs")

    def __init__(self, nbytes: int) -> None:
        self._data: Bytes = new_bytes(nbytes)
        self._used = 0
        self.runs: list[FileRun] = []

    @property
    def is_full(self) -> bool:
        """True if nothing more fits in."""
        return self._used == len(self._data)

    def take(self, offset: int, source: Bytes) -> int:
        """Copy as much of the bytes as fits in, and return how much that is."""
        taken = min(len(source), len(self._data) - self._used)
        self._data[self._used : self._used + taken] = source[:taken]
        last = self.runs[-1] if self.runs else None
        if last is not None and last.offset + last.nbytes == offset:
            self.runs[-1] = last._replace(nbytes=last.nbytes + taken)
        else:
            self.runs.append(FileRun(offset, self._used, taken))

        self._used += taken
        return taken

    def in_order(self) -> tuple[Bytes, Sequence[FileRun]]:
        """Return the bytes in the order of the file, and their runs."""
        data = self._data[: self._used]
        ascending = sorted(self.runs)
        if ascending == self.runs:
            return data, ascending

        moved: list[FileRun] = []
        at = 0
        for run in ascending:
            moved.append(run._replace(at=at))
            at += run.nbytes

        return np.concatenate([data[run.at : run.at + run.nbytes] for run in ascending]), moved


def kept(
    source: str | Bytes, data: Bytes, runs: Sequence[FileRun], stretch: int
) -> Iterator[tuple[int, StoredRuns]]:
    """Say which bytes of an object belong to which stretch of the file, with their checksum. Pure.

    Args:
        source: Where they will be found.
        data: All of them.
        runs: In the order of the file, and without gaps in `data`.
        stretch: The length of each stretch of the file.

    Yields:
        The number of a stretch, and what of it is there.
    """
    pieces = [piece for run in runs for piece in _cut(run, stretch)]
    first = 0
    for at in range(1, len(pieces) + 1):
        number = pieces[first].offset // stretch
        if at < len(pieces) and pieces[at].offset // stretch == number:
            continue

        some = pieces[first:at]
        start, end = some[0].at, some[-1].at + some[-1].nbytes
        offsets = np.array([piece.offset for piece in some], np.int64)
        lengths = np.array([piece.nbytes for piece in some], np.int64)
        yield number, StoredRuns(source, start, end - start, crc32c(data[start:end].data), offsets, lengths)
        first = at


def _cut(run: FileRun, stretch: int) -> Iterator[FileRun]:
    done = 0
    while done < run.nbytes:
        offset = run.offset + done
        nbytes = min(run.nbytes - done, stretch - offset % stretch)
        yield FileRun(offset, run.at + done, nbytes)
        done += nbytes


class Scratch(Protocol):
    """The objects that a long file is made of. Every method blocks, and is thread-safe."""

    def path(self, key: str) -> str:
        """Return what errors call an object."""
        ...

    def put(self, number: int, data: memoryview) -> str:
        """Keep some bytes for a while. Returns the key of their object."""
        ...

    def read(self, key: str, start: int, nbytes: int) -> memoryview:
        """Return bytes that were kept."""
        ...

    def finish(self, parts: Callable[[], Iterator[memoryview]], nbytes: int) -> None:
        """Make the file of its parts, of which each is as long as what an object keeps, but for the last.

        Args:
            parts: Returns them in the order of the file. May be called again, to begin anew.
            nbytes: Of all of them.
        """
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Remove the objects of the parts."""
        ...


@final
class LongFile:
    """A new file of a known length, of which every byte is written once.

    Args:
        scratch: Where its bytes are kept.
        path: Of the file, for errors.
        nbytes: Its length.
        object_bytes: What is gathered in memory until it is put; what each thread that writes may hold.
    """

    __slots__ = (
        "_gathered", "_is_closed", "_is_synced", "_kept", "_keys", "_lock", "_nbytes", "_object_bytes",
        "_path", "_scratch", "_syncing", "transfers",
    )  # fmt: skip

    def __init__(self, scratch: Scratch, path: str, nbytes: int, object_bytes: int) -> None:
        self._scratch, self._path, self._nbytes, self._object_bytes = scratch, path, nbytes, object_bytes
        self._lock, self._syncing = Lock(), Lock()
        self._gathered: ObjectBuffer | None = None
        self._kept: dict[int, list[StoredRuns]] = {}  # by stretch, each as long as an object
        self._keys: list[str | None] = []  # None for one that is being put
        self._is_synced = self._is_closed = False
        self.transfers = Transfers()

    def allocate(self, nbytes: int) -> None:
        """Do nothing: the length is known."""

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            source: Bytes = np.frombuffer(buffer, np.uint8) if buffer.nbytes else np.zeros(0, np.uint8)
            if offset + len(source) > self._nbytes:
                raise StorageError("write", self._path, f"ends after {self._nbytes} bytes", errno.EINVAL)
            if len(source) > self._object_bytes // 2:
                self._put_whole(offset, source)
            else:
                self._gather(offset, source)

            offset += len(source)

    def sync(self) -> None:
        with self._syncing:
            if not self._is_synced:
                self._check_open()
                self._keep_rest()
                self._scratch.finish(self._parts, self._nbytes)
                self._is_synced = True
                self._remove_kept()

    def close(self) -> None:
        """Let go of the bytes. If the file was not synced, they are lost."""
        with self._lock:
            was_closed, self._is_closed, self._gathered = self._is_closed, True, None
        if not was_closed and not self._is_synced:
            self._remove_kept()

    def _put_whole(self, offset: int, source: Bytes) -> None:
        """Put bytes from where they are."""
        for at in range(0, len(source), self._object_bytes):
            part = source[at : at + self._object_bytes]
            self._put(part, [FileRun(offset + at, 0, len(part))])
            with self._lock:
                self.transfers += Transfers(direct_bytes=len(part))

    def _gather(self, offset: int, source: Bytes) -> None:
        done = 0
        while done < len(source):
            with self._lock:
                gathered = self._gathered
                if gathered is None:
                    self._check_open()
                    gathered = self._gathered = ObjectBuffer(self._object_bytes)

                taken = gathered.take(offset + done, source[done:])
                done += taken
                self.transfers += Transfers(buffered_bytes=taken)
                filled = gathered.is_full  # by this thread: asked under the lock, or two would put it
                if filled:
                    self._gathered = None

            if filled:
                self._put(*gathered.in_order())  # while others go on

    def _put(self, data: Bytes, runs: Sequence[FileRun]) -> None:
        with self._lock:
            self._check_open()
            number = len(self._keys)
            self._keys.append(None)

        key = self._scratch.put(number, data.data)
        found = list(kept(key, data, runs, self._object_bytes))
        with self._lock:
            self._keys[number] = key
            for stretch, each in found:
                self._kept.setdefault(stretch, []).append(each)

    def _keep_rest(self) -> None:
        """Keep the bytes in memory that do not fill an object."""
        with self._lock:
            gathered, self._gathered = self._gathered, None
            if gathered is not None:
                data, runs = gathered.in_order()
                for stretch, each in kept(data, data, runs, self._object_bytes):
                    self._kept.setdefault(stretch, []).append(each)

    def _parts(self) -> Iterator[memoryview]:
        for begin in range(0, self._nbytes, self._object_bytes):
            # A fresh one each time: the upload may hold several of them.
            part: Bytes = new_bytes(min(self._object_bytes, self._nbytes - begin))
            there = self._kept.get(begin // self._object_bytes, [])
            if sum([each.nbytes for each in there]) != len(part):
                raise StorageError("sync", self._path, "was not written wholly", errno.EINVAL)

            for each in there:
                data, at = self._read(each), 0
                for offset, nbytes in zip(each.offsets.tolist(), each.lengths.tolist(), strict=True):
                    part[offset - begin : offset - begin + nbytes] = data[at : at + nbytes]
                    at += nbytes

            yield part.data

    def _read(self, each: StoredRuns) -> Bytes:
        """Return bytes that were kept. What came back damaged is asked for once more."""
        end_if_cancelled()  # an upload of gigabytes must not be waited for
        if not isinstance(each.source, str):
            return each.source[each.start : each.start + each.nbytes]

        for _ in range(2):
            found = self._scratch.read(each.source, each.start, each.nbytes)
            if found.nbytes == each.nbytes and crc32c(found) == each.crc32c:
                return np.frombuffer(found, np.uint8)

        path = self._scratch.path(each.source)
        raise ChecksumError(path, f"does not hold what was put there for {self._path}, read twice")

    def _remove_kept(self) -> None:
        with self._lock:
            keys = [key for key in self._keys if key is not None]
            self._keys, self._kept = [], {}
        if keys:
            with suppress(StorageError):  # the end of the save removes what is left
                self._scratch.remove(keys)

    def _check_open(self) -> None:
        if self._is_closed or self._is_synced:
            raise StorageError("write", self._path, "was closed", errno.EBADF)


_TRIES: Final = 3
"""Of an upload that the server ends with an error which the client does not understand."""


@final
class BucketScratch:
    """Keeps objects next to the prefix that is claimed, where they are no part of any checkpoint.

    What ends a save removes them, and so does one that takes its claim over. The file itself is uploaded in
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
        """Upload a file to a key that no other writer has.

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
