"""A data file of the local file system, written at chosen offsets."""

from __future__ import annotations

__all__ = ("LocalDataFile",)

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Lock
from typing import Final, final

import numpy as np

from penstock.handlers.stores.aligned_buffers import Arena
from penstock.handlers.stores.descriptor import Descriptor, translated
from penstock.handlers.stores.direct_io import PAGE, Io, address_of, cut, open_direct, parts_of
from penstock.handlers.stores.synced_files import SyncedFiles
from penstock.handlers.stores.system_calls.linux_calls import allocate
from penstock.handlers.stores.system_calls.vectored_io import write_vectored
from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.transfers import Transfers

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
        arena: Lends aligned buffers; shared by the files of a store.
        synced: Told of the file once it is synced.
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
        "_transfers",
        "path",
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
        self._transfers = Transfers()
        self._lost: StorageError | None = None
        self.path = path
        self._open = True
        arena.enter()

    @property
    def transfers(self) -> Transfers:
        """The bytes written so far, by the way that they went."""
        return self._transfers

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
            offset: Bytes from the beginning of the file; may lie past its end.
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
            self._transfers += Transfers(direct_bytes, nbytes - direct_bytes)

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
