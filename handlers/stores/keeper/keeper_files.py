"""Data files in a keeper's memory: written into pages that the keeper has reserved, and read from there."""

from __future__ import annotations

__all__ = ("KeeperDataFile", "KeeperReadableFile")

import errno
import os
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Final, final

from penstock.handlers.stores.keeper.connection import Connections
from penstock.handlers.stores.keeper.messages import Finish, Reserve, Reserved
from penstock.handlers.stores.regular_files import transfer, translated, write_vectored
from penstock.kernel.errors import StorageError, TruncatedDataError
from penstock.kernel.protocols.stores import Transfers

_RESERVED_AT_ONCE: Final = 256 * 2**20
"""By one question, so that the answer takes a limited time however long the file is."""

_MOST_AHEAD: Final = 32 * 2**20
_ZEROS: Final = bytes(2**16)


@final
class KeeperDataFile:
    """A file that is written at chosen offsets. Several threads may write to separate ranges at once.

    Every byte goes into a page that the keeper has reserved, by a system call: a lack of memory is an error,
    and no signal. Where pages were used before, what is not written is filled with zeros.

    Args:
        connections: To the keeper.
        path: Of the file, for errors.
        number: Of the file.
        is_alone: Whether no other process writes it.
    """

    __slots__ = (
        "_connections",
        "_descriptor",
        "_end",
        "_is_alone",
        "_is_ended",
        "_is_zero",
        "_lock",
        "_number",
        "_reserved",
        "_reserving",
        "_written",
        "path",
        "transfers",
    )

    def __init__(self, connections: Connections, path: str, number: int, *, is_alone: bool) -> None:
        self.path = path
        self.transfers = Transfers()  #: the bytes written so far
        self._connections, self._number, self._is_alone = connections, number, is_alone
        self._descriptor = -1  # until something is reserved, and when it is closed
        self._reserved = self._end = 0
        self._is_zero = True  # whether nothing was ever written into the pages
        self._is_ended = False  # whether the keeper knows how long it is
        self._written: list[tuple[int, int]] = []
        self._lock = Lock()  # of the figures
        self._reserving = Lock()

    def allocate(self, nbytes: int) -> None:
        """Have the keeper reserve pages for the first bytes.

        Raises:
            StorageError: With `errno.ENOSPC` if it has no room.
        """
        with self._reserving:
            self._reserve(nbytes)

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers one after another, beginning at `offset`.

        Raises:
            StorageError: With `errno.ENOSPC` if the keeper has no room; if the keeper is lost.
        """
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        nbytes = sum(map(len, views))
        end = offset + nbytes
        if end > self._reserved:
            self._reserve_ahead(end)
        if nbytes:
            with translated("write", self.path):
                write_vectored(self._descriptor, offset, views)

        with self._lock:
            self._is_ended = False
            self._written.append((offset, end))
            self._end = max(self._end, end)
            self.transfers += Transfers(buffered_bytes=nbytes)

    def sync(self) -> None:
        """End the file after its last byte, and say so to the keeper, which has it already.

        Raises:
            StorageError: If the keeper is lost, or the file was removed.
        """
        with self._lock:
            gaps = list(_gaps(self._written)) if self._is_alone and not self._is_zero else []

        for start, end in gaps:
            with translated("write", self.path):
                for at in range(start, end, len(_ZEROS)):
                    write_vectored(self._descriptor, at, [memoryview(_ZEROS)[: end - at]])

        self._connections.call("sync", self.path, Finish(self._number, self._end, self._is_alone), type(None))
        self._is_ended = True

    def close(self) -> None:
        """Close the file. Idempotent. If it has not ended, others may go on with it: then it ends here."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            if not self._is_ended and self._end:
                self._descriptor = descriptor
                self.sync()
        except StorageError:
            pass  # the build is gone, or the keeper: there is nothing to go on with
        finally:
            self._descriptor = -1
            os.close(descriptor)

    def _reserve_ahead(self, end: int) -> None:
        with self._reserving:
            if end <= self._reserved:
                return
            try:
                self._reserve(max(end, min(2 * self._reserved, self._reserved + _MOST_AHEAD)))
            except StorageError as error:
                if error.errno != errno.ENOSPC:
                    raise

                self._reserve(end)

    def _reserve(self, nbytes: int) -> None:
        """Reserve the first bytes; called by one thread at a time."""
        while self._reserved < nbytes:
            upto = min(self._reserved + _RESERVED_AT_ONCE, nbytes)
            wanted = Reserve(self._number, upto, nbytes, self._descriptor < 0)
            found, descriptor = self._connections.call_for_file("allocate", self.path, wanted, Reserved)
            if descriptor is not None:
                self._descriptor = descriptor
            if self._descriptor < 0:
                raise StorageError("allocate", self.path, "the keeper sent no descriptor", errno.EPROTO)

            self._is_zero = self._is_zero and found.is_zero
            self._reserved = found.nbytes


@final
class KeeperReadableFile:
    """A file that is read at chosen offsets.

    Args:
        path: For errors.
        nbytes: Its length. The memory may have more pages.
        source: A descriptor, which is closed with it; or the content of a document.
    """

    __slots__ = ("_data", "_descriptor", "_lock", "_nbytes", "_path", "transfers")

    def __init__(self, path: str, nbytes: int, source: int | bytes | None) -> None:
        self._path, self._nbytes = path, nbytes
        self._descriptor = source if isinstance(source, int) else -1
        self._data = source if isinstance(source, bytes) else None
        self._lock = Lock()
        self.transfers = Transfers()  #: the bytes read so far

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers one after another, beginning at `offset`.

        Raises:
            TruncatedDataError: If the file ends before they are full.
            StorageError: If the system refuses.
        """
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        nbytes = sum(map(len, views))
        if offset + nbytes > self._nbytes:
            raise TruncatedDataError(self._path, offset + nbytes, self._nbytes)

        if self._data is not None:
            for view in views:
                view[:] = self._data[offset : offset + len(view)]
                offset += len(view)
        elif nbytes:
            with translated("read", self._path):
                reached = transfer(os.preadv, self._descriptor, offset, views)
            if reached < offset + nbytes:
                raise TruncatedDataError(self._path, offset + nbytes, reached)

        with self._lock:
            self.transfers += Transfers(buffered_bytes=nbytes)

    def whole(self) -> bytes:
        """Return all of the file."""
        if self._data is not None:
            return self._data

        data = bytearray(self._nbytes)
        self.read_at(0, [memoryview(data)])
        return bytes(data)

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _gaps(written: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges before the last byte that were not written."""
    reached = 0
    for start, end in sorted(written):
        if start > reached:
            yield reached, start

        reached = max(reached, end)
