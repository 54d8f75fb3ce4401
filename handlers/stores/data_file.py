"""Data files of the local file system, written and read at chosen offsets."""

from __future__ import annotations

__all__ = (
    "LocalDataFile",
    "LocalReadableFile",
)

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from threading import Lock
from typing import Final, final

import numpy as np
from crc32c import crc32c

from penstock.handlers.stores.direct_io import (
    DIRECT_FROM,
    PAGE,
    Arena,
    Io,
    TransferPart,
    address_of,
    allocate,
    cached_bytes,
    cut,
    open_direct,
    parts_of,
)
from penstock.handlers.stores.regular_files import (
    Descriptor,
    SyncedFiles,
    read_vectored,
    translated,
    write_vectored,
)
from penstock.kernel.errors import StorageError, TruncatedDataError
from penstock.kernel.protocols.stores import Transfers

# The errors of a file system that opens a file with O_DIRECT but then refuses direct transfers.
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


@final
class LocalDataFile:
    """A file that is written at chosen offsets. Several threads may write to separate ranges at once.

    Large requests bypass the page cache where the file system allows it: they leave no dirty pages to be
    written back later, and their speed does not depend on how many pages are free. They are copied through
    a small arena unless they are page-aligned in memory already.

    Args:
        path: Path of the file.
        io: Whether large requests bypass the page cache; "auto" decides by the type of the file system.
        arena: The aligned buffers; shared by the files of a store.
        synced: Called with the file once it is synced.
        create: Whether it must not exist yet; otherwise another process has made it.
    """

    __slots__ = (
        "_allocated",
        "_arena",
        "_descriptor",
        "_direct",
        "_end",
        "_lock",
        "_lost",
        "_open",
        "_refused",
        "_synced",
        "path",
        "transfers",
    )

    def __init__(
        self, path: str, io: Io, arena: Arena, synced: SyncedFiles | None = None, *, create: bool = True
    ) -> None:
        # O_EXCL, because two saves writing into one file would both be corrupted.
        self._descriptor = Descriptor(path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if create else 0))
        self._direct = open_direct(self._descriptor, os.O_WRONLY, io)
        self._refused = self._direct is None
        self._arena = arena
        self._synced = synced
        self._lock = Lock()
        self._allocated = self._end = 0
        self.transfers = Transfers()  #: the bytes written so far, by the way that they went
        self._lost: StorageError | None = None
        self.path = path
        self._open = True
        arena.enter()

    def allocate(self, nbytes: int) -> None:
        """Reserve room for the first `nbytes` of the file, so that a full disk is noticed now.

        Several threads can write past the page cache at once to blocks that are already allocated. `sync`
        releases what was not written. Does nothing where the file system cannot allocate.

        Raises:
            StorageError: If there is no room.
        """
        self._check()
        start = self._allocated
        if nbytes > start:
            with translated("allocate", self.path):
                done = allocate(self._descriptor.number, start, nbytes - start)
            if done:
                with self._lock:
                    self._allocated = max(self._allocated, nbytes)

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers in full, one after another, beginning at `offset`.

        Args:
            offset: Bytes from the beginning of the file; may be past its end.
            buffers: Contiguous, of any item type, in any number.

        Raises:
            StorageError: If the medium refuses, or an earlier `sync` failed.
        """
        self._check()
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        nbytes = sum(map(len, views))
        at, direct_bytes = offset, 0
        with translated("write", self.path):
            if self._refused:
                write_vectored(self._descriptor.number, offset, views)
            else:
                parts = parts_of(offset, nbytes, self._arena.block_bytes)
                runs = cut(views, [part.nbytes for part in parts])
                for part, run in zip(parts, runs, strict=True):
                    if part.direct and self._write_direct(at, part.nbytes, run):
                        direct_bytes += part.nbytes
                    else:
                        write_vectored(self._descriptor.number, at, run)

                    at += part.nbytes

        with self._lock:
            self._end = max(self._end, offset + nbytes)
            self.transfers += Transfers(direct_bytes, nbytes - direct_bytes)

    def sync(self) -> None:
        """Make every byte, and the size of the file, durable.

        Raises:
            StorageError: If it fails, or failed before. Linux reports a failed write-back only once and then
                drops the pages, so a second fsync could succeed although bytes are lost. It is therefore
                not tried (PostgreSQL's "fsyncgate" of 2018).
        """
        self._check()
        try:
            if self._allocated > self._end:
                with translated("truncate", self.path):
                    os.ftruncate(self._descriptor.number, self._end)

                self._allocated = self._end

            with translated("fsync", self.path):
                os.fsync(self._descriptor.number)
                if self._synced is not None:
                    self._synced.note(self._descriptor.number)
        except StorageError as error:
            self._lost = error
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._open:
            self._open = False
            self._arena.leave()

        with ExitStack() as stack:
            stack.callback(self._descriptor.close)
            if self._direct is not None:
                stack.callback(self._direct.close)

    def _write_direct(self, offset: int, nbytes: int, views: list[memoryview]) -> bool:
        """Write whole pages past the page cache; return False if the file system refuses."""
        if self._refused or self._direct is None:
            return False
        try:
            if len(views) == 1 and address_of(views[0]) % PAGE == 0:
                write_vectored(self._direct.number, offset, views)
            else:
                with self._arena.block() as block:
                    _gather(views, block)
                    write_vectored(self._direct.number, offset, [block[:nbytes].data])
        except OSError as error:
            if error.errno not in _REFUSED:
                raise

            self._refused = True
            return False

        return True

    def _check(self) -> None:
        if self._lost is not None:
            problem = "an earlier fsync failed, so what the file holds is unknown"
            raise StorageError("use", self.path, problem, self._lost.errno) from self._lost


def _gather(views: Sequence[memoryview], block: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    at = 0
    for view in views:
        # numpy releases the interpreter lock while it copies.
        np.copyto(block[at : at + len(view)], np.frombuffer(view, np.uint8))
        at += len(view)


WINDOW = 16 * 2**20  #: bytes that are read either directly or buffered; a direct read is one call for all
SUMMED = 2 * 2**20
"""Bytes that are read at a time from the page cache to be summed: a huge page, and the caches hold it."""


@final
class LocalReadableFile:
    """An existing file, read at chosen offsets by several threads at once.

    In a large request, windows that are mostly in the page cache are copied from there. The others are read
    directly into the buffers where the file system and the alignment allow it, else through the page cache.

    Args:
        path: Path of the file.
        io: "auto" is described above; "direct" ignores the page cache; "buffered" always reads through it.
    """

    __slots__ = ("_descriptor", "_direct", "_io", "_lock", "_refused", "path", "transfers")

    def __init__(self, path: str, io: Io) -> None:
        self._descriptor = Descriptor.of_regular(path)
        self._direct: Descriptor | None = None
        self._io: Io = io
        self._refused = io == "buffered"
        self._lock = Lock()
        self.transfers = Transfers()  #: the bytes read so far, by the way that they came
        self.path = path

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, beginning at `offset`.

        Args:
            offset: Bytes from the beginning of the file.
            buffers: Writable and contiguous, of any item type, in any number.

        Raises:
            TruncatedDataError: If the file ends before the buffers are full.
            StorageError: If the medium refuses.
        """
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        needed = offset + sum(map(len, views))
        at = offset
        with translated("read", self.path):
            for is_large, run in groupby(views, _is_large):
                for group in [[view] for view in run] if is_large else [list(run)]:
                    end = at + sum(map(len, group))
                    at = self._read_large(at, group[0]) if is_large else self._read(at, group)
                    if at < end:
                        raise self._truncated(needed)

    def read_summed(self, offset: int, buffer: memoryview) -> int:
        """Fill one buffer as `read_at` does, and return the crc32c of its bytes.

        Bytes from the page cache are summed block by block, before they leave the processor's cache.

        Args:
            offset: Bytes from the beginning of the file.
            buffer: Writable and contiguous, of any item type.

        Raises:
            TruncatedDataError: If the file ends before the buffer is full.
            StorageError: If the medium refuses.
        """
        view = buffer.cast("B")
        summed = _Summed()
        with translated("read", self.path):
            if self._read_large(offset, view, summed) < offset + len(view):
                raise self._truncated(offset + len(view))

        return summed.crc32c

    def close(self) -> None:
        """Close the file. Idempotent."""
        with ExitStack() as stack:
            stack.callback(self._descriptor.close)
            if self._direct is not None:
                stack.callback(self._direct.close)

    def _read(self, offset: int, views: Sequence[memoryview]) -> int:
        """Read through the page cache, and return the offset reached."""
        reached = read_vectored(self._descriptor.number, offset, views)
        self._count(buffered_bytes=reached - offset)
        return reached

    def _read_large(self, offset: int, view: memoryview, summed: _Summed | None = None) -> int:
        """Read each part directly or through the page cache, and return the offset reached."""
        parts = [TransferPart(len(view), direct=False)]
        if not self._refused and (offset - address_of(view)) % PAGE == 0:
            parts = parts_of(offset, len(view), WINDOW)

        at = offset
        for part in parts:
            end = at + part.nbytes
            rest = view[at - offset : end - offset]
            if part.direct and self._is_wanted_directly(at, part.nbytes):
                moved = self._read_direct(at, rest)
                if summed is not None:
                    summed.add(rest[:moved])

                at, rest = at + moved, rest[moved:]
            if at < end:  # the whole part, or the rest of a short direct read
                at = self._read(at, [rest]) if summed is None else self._read_summing(at, rest, summed)
            if at < end:
                break

        return at

    def _read_summing(self, offset: int, view: memoryview, summed: _Summed) -> int:
        """Read through the page cache block by block, and return the offset reached."""
        for start in range(0, len(view), SUMMED):
            block = view[start : start + SUMMED]
            moved = self._read(offset + start, [block]) - offset - start
            summed.add(block[:moved])
            if moved < len(block):
                return offset + start + moved

        return offset + len(view)

    def _truncated(self, needed: int) -> TruncatedDataError:
        return TruncatedDataError(self.path, needed, os.fstat(self._descriptor.number).st_size)

    def _is_wanted_directly(self, offset: int, nbytes: int) -> bool:
        if self._refused or self._io != "auto":
            return not self._refused

        cached = cached_bytes(self._descriptor.number, offset, nbytes)
        return cached is not None and 2 * cached < nbytes

    def _read_direct(self, offset: int, view: memoryview) -> int:
        """Read past the page cache. Return the number of bytes read, 0 if the file does not allow it."""
        try:
            descriptor = self._opened_directly()
            moved = 0 if descriptor is None else os.preadv(descriptor.number, [view], offset)
        except OSError:  # a read through the page cache follows, which succeeds or reports the error
            self._refused = True
            return 0

        self._count(direct_bytes=moved)
        return moved

    def _opened_directly(self) -> Descriptor | None:
        # Opened only when needed: a checkpoint may have many files, and a process has few descriptors.
        with self._lock:
            if self._direct is None and not self._refused:
                self._direct = open_direct(self._descriptor, os.O_RDONLY, self._io)
                self._refused = self._direct is None

            return None if self._refused else self._direct

    def _count(self, direct_bytes: int = 0, buffered_bytes: int = 0) -> None:
        with self._lock:
            self.transfers += Transfers(direct_bytes, buffered_bytes)


@final
class _Summed:
    """The crc32c of the bytes so far."""

    __slots__ = ("crc32c",)

    def __init__(self) -> None:
        self.crc32c = 0

    def add(self, data: memoryview) -> None:
        self.crc32c = crc32c(data, self.crc32c)


def _is_large(view: memoryview) -> bool:
    return len(view) >= DIRECT_FROM
