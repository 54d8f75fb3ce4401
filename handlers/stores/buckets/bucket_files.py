"""Data files of a bucket: one object each, put when it is complete and read by ranges."""

from __future__ import annotations

__all__ = ("BucketDataFile", "BucketReadableFile", "new_bytes")

import errno
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from penstock.handlers.stores.buckets.objects import Objects
from penstock.kernel.errors import StorageError, TruncatedDataError
from penstock.kernel.memory.buffers import MAPPED_FROM, anonymous_memory
from penstock.kernel.protocols.stores import Transfers

_Bytes = NDArray[np.uint8]


@final
class BucketDataFile:
    """A new object. Its bytes are gathered in memory, and `sync` puts them in one request.

    Args:
        put: Writes the object.
        path: Of the object, for errors.
    """

    __slots__ = ("_bytes", "_end", "_is_put", "_lock", "_path", "_put", "transfers")

    def __init__(self, put: Callable[[memoryview], None], path: str) -> None:
        self._put, self._path = put, path
        self._lock = Lock()
        self._bytes: _Bytes | None = np.zeros(0, np.uint8)
        self._end = 0
        self._is_put = False
        self.transfers = Transfers()

    def allocate(self, nbytes: int) -> None:
        """Reserve address space for so many bytes, so that growing moves none. Takes no memory yet."""
        with self._lock:
            self._grow(nbytes)

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            nbytes = buffer.nbytes
            if not nbytes:
                continue

            with self._lock:
                held = self._grow(offset + nbytes)
                self._end = max(self._end, offset + nbytes)
                # Under the lock: another writer may have to move all bytes to a larger place.
                held[offset : offset + nbytes] = np.frombuffer(buffer, np.uint8)
                self.transfers += Transfers(buffered_bytes=nbytes)

            offset += nbytes

    def write_whole(self, buffer: memoryview) -> None:
        with self._lock:
            if self._end or self._bytes is None:
                raise StorageError("write", self._path, "has content already", errno.EBADF)

            self._bytes = None
            self._put(buffer)
            self._is_put = True
            self.transfers += Transfers(direct_bytes=buffer.nbytes)

    def sync(self) -> None:
        with self._lock:
            if self._is_put:
                return

            held = self._grow(0)
            self._put(held[: self._end].data)
            self._is_put, self._bytes = True, None

    def close(self) -> None:
        """Let go of the bytes. Those that were not synced are lost."""
        self._bytes = None

    def _grow(self, nbytes: int) -> _Bytes:
        held = self._bytes
        if held is None:
            raise StorageError("write", self._path, "was closed", errno.EBADF)

        if nbytes > len(held):
            larger: _Bytes = new_bytes(max(nbytes, min(2 * len(held), len(held) + 2**24)))
            larger[: self._end] = held[: self._end]
            self._bytes = held = larger

        return held


@final
class BucketReadableFile:
    """An object, read by ranges.

    Args:
        client: Of the bucket.
        key: Of the object.
        size: Its length in bytes.
    """

    __slots__ = ("_client", "_key", "_lock", "_size", "transfers")

    def __init__(self, client: Objects, key: str, size: int) -> None:
        self._client, self._key, self._size = client, key, size
        self._lock = Lock()
        self.transfers = Transfers()

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        needed = sum([buffer.nbytes for buffer in buffers])
        path = self._client.path(self._key)
        if offset + needed > self._size:
            raise TruncatedDataError(path, offset + needed, self._size)
        if not needed:
            return

        found = self._client.read_range(self._key, offset, needed)
        if found.nbytes != needed:  # it was replaced by a shorter one meanwhile
            raise TruncatedDataError(path, offset + needed, offset + found.nbytes)

        at = 0
        got: NDArray[Any] = np.frombuffer(found, np.uint8)
        for buffer in buffers:
            if buffer.nbytes:
                np.copyto(np.frombuffer(buffer, np.uint8), got[at : at + buffer.nbytes])
                at += buffer.nbytes

        with self._lock:
            self.transfers += Transfers(buffered_bytes=needed)

    def close(self) -> None:
        """Do nothing: no connection belongs to the file."""


def new_bytes(nbytes: int) -> _Bytes:
    """Return memory that goes back to the system when it is freed.

    The allocator keeps what many threads free in turn: a save would leave behind more than it held.
    """
    if nbytes < MAPPED_FROM:
        return np.zeros(nbytes, np.uint8)

    return np.frombuffer(anonymous_memory(nbytes), np.uint8)
