"""Files of the local file system, open for reading or writing at chosen offsets."""

from __future__ import annotations

__all__ = ("LocalDataFile", "LocalReadableFile")

import os
from collections.abc import Sequence
from typing import final

from penstock.handlers.stores.descriptor import Descriptor, translated
from penstock.handlers.stores.vectored import read_vectored, write_vectored
from penstock.kernel.errors import StorageError, TruncatedDataError


@final
class LocalDataFile:
    """A new file, written at chosen offsets. Threads may write at once to ranges apart."""

    __slots__ = ("_descriptor", "_lost", "path")

    def __init__(self, path: str) -> None:
        # O_EXCL, because two saves that wrote into one file would both be lost.
        self._descriptor = Descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._lost: StorageError | None = None
        self.path = path

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers one after another, beginning at `offset`; never short.

        Args:
            offset: Bytes from the beginning of the file; may lie behind its end.
            buffers: Contiguous, of any item type, in any number.

        Raises:
            StorageError: If the medium refuses, or an earlier `sync` failed.
        """
        self._check()
        with translated("write", self.path):
            write_vectored(self._descriptor.number, offset, buffers)

    def sync(self) -> None:
        """Make every byte, and the size of the file, durable.

        Raises:
            StorageError: If that failed, now or before. Linux reports a failed write-back once and
                then forgets the pages, so a second fsync that succeeds would prove nothing: it is
                not made (PostgreSQL's "fsyncgate" of 2018).
        """
        self._check()
        try:
            with translated("fsync", self.path):
                os.fsync(self._descriptor.number)
        except StorageError as error:
            self._lost = error
            raise

    def close(self) -> None:
        """Idempotent."""
        self._descriptor.close()

    def _check(self) -> None:
        if self._lost is not None:
            problem = "an earlier fsync failed, so what the file holds is unknown"
            raise StorageError("use", self.path, problem, self._lost.errno) from self._lost


@final
class LocalReadableFile:
    """An existing file, read at chosen offsets by several threads at once."""

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: str) -> None:
        self._descriptor = Descriptor(path, os.O_RDONLY)
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
        needed = offset + sum(buffer.nbytes for buffer in buffers)
        with translated("read", self.path):
            if read_vectored(self._descriptor.number, offset, buffers) < needed:
                raise TruncatedDataError(self.path, needed, os.fstat(self._descriptor.number).st_size)

    def close(self) -> None:
        """Idempotent."""
        self._descriptor.close()
