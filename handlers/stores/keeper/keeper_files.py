"""Data files in a keeper's memory: written into pages that it has reserved, and read from there."""

from __future__ import annotations

__all__ = ("KeeperDataFile", "KeeperReadableFile", "PageMappings", "SplicePipe")

import errno
import fcntl
import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.stores.keeper.connection import Connections
from penstock.handlers.stores.keeper.drafts import Draft
from penstock.handlers.stores.keeper.messages import Finish, Reserve, Reserved
from penstock.handlers.stores.regular_files import transfer, translated, write_vectored
from penstock.kernel.errors import KeeperLostError, StorageError, TruncatedDataError
from penstock.kernel.memory.buffers import file_memory
from penstock.kernel.memory.memory_limit import SystemMemory
from penstock.kernel.protocols.stores import Transfers

_RESERVED_AT_ONCE: Final = 256 * 2**20
"""By one question, so that the answer takes a limited time however long the file is."""

_MOST_AHEAD: Final = 32 * 2**20
_LEAST_MARGIN: Final = 2**24
_MAPPED_FROM: Final = 2**20
_COPIED_FROM: Final = 2**16  # what is shorter is written by a system call
_MOST_MAPPINGS: Final = 256
_ZEROS: Final = bytes(2**16)


@final
class PageMappings:
    """The pages of a keeper that this process has mapped to write there, as long as both live. Thread-safe.

    A copy into pages that are mapped takes a third of the time of a system call that writes them; to map them
    takes a little longer than that call. So they are mapped when they are written the second time: the keeper
    has the same ones written again and again.
    """

    __slots__ = ("_known", "_lock")

    def __init__(self) -> None:
        # None: written once. The one that was used last is the last.
        self._known: dict[int, npt.NDArray[np.uint8] | None] = {}
        self._lock = Lock()

    def of(self, pages: int, descriptor: int, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return the first bytes of pages, and perhaps more; None if they are not to be mapped, or cannot be.

        Args:
            pages: Their number.
            descriptor: Of their file.
            nbytes: All of these have been reserved.
        """
        with self._lock:
            was_written = pages in self._known
            found = self._known.pop(pages, None)

        if was_written and (found is None or len(found) < nbytes):
            try:
                found = np.frombuffer(file_memory(descriptor, nbytes, writable=True), np.uint8)
            except OSError:
                return None

        with self._lock:
            self._known[pages] = found
            if len(self._known) > _MOST_MAPPINGS:
                del self._known[next(iter(self._known))]

        return found

    def clear(self) -> None:
        """Forget all: the keeper has ended, and its memory would stay for these mappings alone."""
        with self._lock:
            self._known.clear()


@final
class KeeperDataFile:
    """A file that is written at chosen offsets. Several threads may write to separate ranges at once.

    Every byte goes into a page that the keeper has reserved: a lack of memory is an error, and no signal.
    Where pages were used before, what is not written is filled with zeros.

    Args:
        connections: To the keeper.
        mappings: Of its pages.
        path: Of the file, for errors.
        number: Of the file.
        is_alone: Whether no other process writes it.
        draft: That it is in: with that it goes on when the keeper is lost, in pages of this process.
    """

    __slots__ = (
        "_connections",
        "_content",
        "_descriptor",
        "_draft",
        "_end",
        "_is_alone",
        "_is_ended",
        "_is_zero",
        "_lock",
        "_mappings",
        "_memory",
        "_number",
        "_pages",
        "_reserved",
        "_reserving",
        "_source",
        "_written",
        "path",
        "transfers",
    )

    def __init__(
        self,
        connections: Connections,
        mappings: PageMappings,
        path: str,
        number: int,
        *,
        is_alone: bool,
        draft: Draft | None = None,
    ) -> None:
        self.path = path
        self._draft = None if draft is None else weakref.ref(draft)  # which has this file
        self._content: memoryview | None = None  # of a draft's file that is closed
        self.transfers = Transfers()  #: the bytes written so far
        self._connections, self._number, self._is_alone = connections, number, is_alone
        self._mappings = mappings
        self._descriptor = self._source = -1  # until something is reserved, and when it is closed
        self._pages = 0
        self._memory: npt.NDArray[np.uint8] | None = None
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
            if self._reserved >= _MAPPED_FROM and self._memory is None:
                self._memory = self._mappings.of(self._pages, self._source, self._reserved)

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
        memory = self._memory
        if memory is not None and nbytes >= _COPIED_FROM and end <= len(memory):
            at = offset
            for view in views:
                np.copyto(memory[at : at + len(view)], np.frombuffer(view, np.uint8))  # others run meanwhile
                at += len(view)
        elif nbytes:
            with translated("write", self.path):
                write_vectored(self._descriptor, offset, views)

        self._note_written(offset, end)

    def receive(self, connected: socket.socket, pipe: SplicePipe, offset: int, nbytes: int) -> int:
        """Write what comes by a socket. None of it comes into memory of this process.

        Args:
            connected: The socket.
            pipe: That it goes through.
            offset: Of the first byte; pages have been allocated.
            nbytes: At most so many.

        Returns:
            How many were written; 0 if the other side has closed the connection.

        Raises:
            BlockingIOError: If nothing has come, and the socket waits no longer.
            OSError: If the connection is broken.
            StorageError: If the system refuses to write.
        """
        moved = pipe.fill(connected, nbytes)
        with translated("write", self.path):
            pipe.empty(self._descriptor, offset, moved)

        self._note_written(offset, offset + moved)
        return moved

    def _note_written(self, start: int, end: int) -> None:
        with self._lock:
            self._is_ended = False
            self._written.append((start, end))
            self._end = max(self._end, end)
            self.transfers += Transfers(buffered_bytes=end - start)

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

        finish = Finish(self._number, self._end, self._is_alone)
        if not self._is_drafted():
            try:
                self._connections.call("sync", self.path, finish, type(None))
            except KeeperLostError:
                if not self._is_drafted():
                    raise

        self._is_ended = True
        self._reserved, self._memory = self._end, None  # the keeper may have given back what is after it

    def close(self) -> None:
        """Close the file. Idempotent. If it has not ended, others may go on with it: then it ends here."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            self._descriptor = descriptor
            if not self._is_ended and self._end:
                self.sync()
        except StorageError:
            pass  # the build is gone, or the keeper: there is nothing to go on with
        finally:
            draft = None if self._draft is None else self._draft()
            if draft is not None:
                try:
                    self._content = self.content()
                except OSError:
                    draft.leave_out()

            self._descriptor, self._memory = -1, None
            os.close(self._source)
            os.close(descriptor)

    @property
    def nbytes(self) -> int:
        """Its length so far."""
        return self._end

    def content(self) -> memoryview:
        """Return its bytes, mapped. Only of a file that is in a draft can this be asked once it is closed.

        By this mapping the keeper sees that it is in use, and does not give its pages to another file.

        Raises:
            OSError: If it cannot be mapped.
        """
        if self._content is not None:
            return self._content

        return file_memory(self._descriptor, self._end) if self._end else memoryview(b"")

    def _is_drafted(self) -> bool:
        """True if the keeper is lost, and this goes on without."""
        draft = None if self._draft is None else self._draft()
        return draft is not None and draft.lost is not None

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
            if self._is_drafted():
                self._reserve_alone(upto)
                continue

            wanted = Reserve(self._number, upto, nbytes, self._descriptor < 0)
            try:
                found, descriptors = self._connections.call_for_file("allocate", self.path, wanted, Reserved)
            except KeeperLostError:
                if self._is_drafted():
                    continue

                raise

            if self._descriptor < 0:
                if len(descriptors) != 2:
                    for descriptor in descriptors:
                        os.close(descriptor)

                    raise StorageError("allocate", self.path, "the keeper sent no descriptors", errno.EPROTO)

                self._descriptor, self._source = descriptors

            self._pages = found.pages
            self._is_zero = self._is_zero and found.is_zero
            self._reserved = found.nbytes

    def _reserve_alone(self, nbytes: int) -> None:
        """Have the system make the pages that the keeper would have made: with it, as much has gone."""
        more = nbytes - self._reserved
        free = SystemMemory().read().free
        if free - _LEAST_MARGIN < more:
            problem = (
                f"the keeper is lost, and this process has no room for {more} more bytes; {free} are free"
            )
            raise StorageError("allocate", self.path, problem, errno.ENOSPC)

        with translated("allocate", self.path):
            if self._descriptor < 0:
                self._descriptor = os.memfd_create("penstock-draft", os.MFD_CLOEXEC)
                self._source = os.dup(self._descriptor)

            os.posix_fallocate(self._descriptor, self._reserved, more)

        self._reserved = nbytes


@final
class SplicePipe:
    """A pipe by which the system moves bytes from a socket into a file: it takes a pipe for that.

    Args:
        nbytes: So much at once, if the user may have so large a pipe.
    """

    __slots__ = ("_read", "_write")

    def __init__(self, nbytes: int) -> None:
        self._read, self._write = os.pipe()
        with suppress(OSError):
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, nbytes)

    def fill(self, connected: socket.socket, nbytes: int) -> int:
        """Take what has come by a socket, at most so much; the pipe is empty before.

        Raises:
            BlockingIOError: If nothing has come, and the socket waits no longer.
        """
        return os.splice(connected.fileno(), self._write, nbytes)

    def empty(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Write what is in it into a file."""
        while nbytes:
            moved = os.splice(self._read, descriptor, nbytes, offset_dst=offset)
            offset += moved
            nbytes -= moved

    def close(self) -> None:
        """Close it. Once."""
        os.close(self._read)
        os.close(self._write)


@final
class KeeperReadableFile:
    """A file that is read at chosen offsets.

    Args:
        path: For errors.
        nbytes: Its length. The memory may have more pages.
        source: A descriptor, which is closed with it; or the content.
    """

    __slots__ = ("_data", "_descriptor", "_lock", "_nbytes", "_path", "transfers")

    def __init__(self, path: str, nbytes: int, source: int | bytes | memoryview | None) -> None:
        self._path, self._nbytes = path, nbytes
        self._descriptor = source if isinstance(source, int) else -1
        self._data = None if source is None or isinstance(source, int) else source
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
                part = memoryview(self._data)[offset : offset + len(view)]
                np.copyto(
                    np.frombuffer(view, np.uint8), np.frombuffer(part, np.uint8)
                )  # others run meanwhile
                offset += len(view)
        elif nbytes:
            with translated("read", self._path):
                reached = transfer(os.preadv, self._descriptor, offset, views)
            if reached < offset + nbytes:
                raise TruncatedDataError(self._path, offset + nbytes, reached)

        with self._lock:
            self.transfers += Transfers(buffered_bytes=nbytes)

    def send(self, connected: socket.socket, offset: int, nbytes: int) -> int:
        """Send some of it by a socket. None of it comes into memory of this process.

        Args:
            connected: The socket.
            offset: Of the first byte.
            nbytes: At most so many, and at least one.

        Returns:
            How many the socket took.

        Raises:
            BlockingIOError: If it takes none, and waits no longer.
            OSError: If the connection is broken.
            TruncatedDataError: If the file ends before the first byte.
        """
        nbytes = min(nbytes, self._nbytes - offset)
        if nbytes <= 0:
            raise TruncatedDataError(self._path, offset + 1, self._nbytes)
        if self._data is not None:
            return connected.send(memoryview(self._data)[offset : offset + nbytes])

        moved = os.sendfile(connected.fileno(), self._descriptor, offset, nbytes)
        if not moved:
            raise TruncatedDataError(self._path, offset + 1, offset)

        with self._lock:
            self.transfers += Transfers(buffered_bytes=moved)

        return moved

    def whole(self) -> bytes:
        """Return all of the file."""
        if isinstance(self._data, bytes):
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
