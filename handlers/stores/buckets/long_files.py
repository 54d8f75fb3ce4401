"""A file of any length in a bucket, written in any order and put together in the end.

An upload in parts takes them in the order of the file alone, and the first bytes of a file may be known last:
those of safetensors hold the checksums of all others. So what is written goes into objects of its own, as it
comes. When all is there, it is read back in the order of the file, compared with its checksums, and uploaded.
"""

from __future__ import annotations

__all__ = ("LongFile", "Scratch")

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Protocol, final

import numpy as np
from anyio.from_thread import check_cancelled
from crc32c import crc32c

from penstock.handlers.stores.buckets.bucket_files import new_bytes
from penstock.handlers.stores.buckets.object_stretches import Bytes, Gathered, Kept, Run, kept
from penstock.kernel.errors import ChecksumError, StorageError
from penstock.kernel.protocols.transfers import Transfers


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
        """Remove what was kept."""
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
        self._gathered: Gathered | None = None
        self._kept: dict[int, list[Kept]] = {}  # by stretch, each as long as an object
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
        """Put bytes from where they lie."""
        for at in range(0, len(source), self._object_bytes):
            part = source[at : at + self._object_bytes]
            self._put(part, [Run(offset + at, 0, len(part))])
            with self._lock:
                self.transfers += Transfers(direct_bytes=len(part))

    def _gather(self, offset: int, source: Bytes) -> None:
        done = 0
        while done < len(source):
            with self._lock:
                gathered = self._gathered
                if gathered is None:
                    self._check_open()
                    gathered = self._gathered = Gathered(self._object_bytes)

                taken = gathered.take(offset + done, source[done:])
                done += taken
                self.transfers += Transfers(buffered_bytes=taken)
                filled = gathered.is_full  # by this thread: asked under the lock, or two would put it
                if filled:
                    self._gathered = None

            if filled:
                self._put(*gathered.in_order())  # while others go on

    def _put(self, data: Bytes, runs: Sequence[Run]) -> None:
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
        """Note what was not enough for an object: it stays in memory."""
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

    def _read(self, each: Kept) -> Bytes:
        """Return bytes that were kept. What came back damaged is asked for once more."""
        _end_if_cancelled()
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


def _end_if_cancelled() -> None:
    """Raise what cancels the save, if anything does: an upload of gigabytes must not be waited for."""
    with suppress(RuntimeError):  # this is no thread of an event loop
        check_cancelled()
