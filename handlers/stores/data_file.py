"""Data files of the local file system, written and read at chosen offsets, past the page cache or through it.

Which bytes of a request may bypass the page cache is decided by pure functions. Among the calls that Python
lacks are `fallocate` without emulation, `fstatfs` and `cachestat` of Linux.
"""

from __future__ import annotations

__all__ = (
    "DIRECT_FROM",
    "PAGE",
    "Arena",
    "Io",
    "LocalDataFile",
    "LocalReadableFile",
    "TransferPart",
    "address_of",
    "allocate",
    "cached_bytes",
    "cut",
    "open_direct",
    "parts_of",
    "takes_direct_io",
)

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from threading import Lock
from typing import Final, Literal, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from penstock.handlers.stores.file_system import c_function
from penstock.handlers.stores.regular_files import (
    MAX_BUFFERS,
    Descriptor,
    SyncedFiles,
    transfer,
    translated,
    write_vectored,
)
from penstock.kernel.errors import StorageError, TruncatedDataError
from penstock.kernel.memory.buffers import anonymous_memory, make_pages
from penstock.kernel.protocols.stores import Transfers

Io: TypeAlias = Literal["auto", "direct", "buffered"]

PAGE = max(4096, mmap.PAGESIZE)  #: bytes of a page; also a multiple of what every disk transfers
DIRECT_FROM = 2**20  #: bytes; for smaller requests, disk latency costs more than the page cache


class TransferPart(NamedTuple):
    """A part of a request, and whether its bytes bypass the page cache."""

    nbytes: int
    direct: bool


def parts_of(offset: int, nbytes: int, block_bytes: int) -> list[TransferPart]:
    """Cut a request, in order, into parts that may bypass the page cache and parts that must not.

    Only whole pages inside the request may. A page at its edge may also hold bytes of another request,
    which are written through the page cache.

    Args:
        offset: Where the request begins in the file, in bytes.
        nbytes: Length of the request.
        block_bytes: The most bytes of one direct part.
    """
    head = -offset % PAGE
    whole = (nbytes - head) // PAGE * PAGE
    if whole < DIRECT_FROM:
        return [TransferPart(nbytes, direct=False)] if nbytes else []

    tail = nbytes - head - whole
    direct = [TransferPart(min(block_bytes, whole - at), direct=True) for at in range(0, whole, block_bytes)]
    return [*_buffered(head), *direct, *_buffered(tail)]


def cut(views: Sequence[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """Cut consecutive views into runs of the given sizes, in order.

    Args:
        views: One-dimensional views of bytes.
        sizes: The bytes of each run; their sum is the total length of the views.

    Yields:
        For each size, the views that make up the run.
    """
    at = start = 0
    for size in sizes:
        run: list[memoryview] = []
        while size:
            taken = min(size, len(views[at]) - start)
            run.append(views[at][start : start + taken])
            size, start = size - taken, start + taken
            if start == len(views[at]):
                at, start = at + 1, 0

        yield run


def address_of(view: memoryview) -> int:
    """Return the memory address of the first byte of a non-empty view."""
    return np.frombuffer(view, np.uint8).ctypes.data


def open_direct(descriptor: Descriptor, flags: int, io: Io) -> Descriptor | None:
    """Open the file of a descriptor a second time, for transfers past the page cache.

    Returns:
        The second descriptor, or None if `io` or the file system rules it out. "auto" allows it only on
        local file systems that are known to be faster this way.
    """
    if sys.platform != "linux" or io == "buffered":
        return None
    if io == "auto" and not takes_direct_io(descriptor.number):
        return None
    try:
        direct = Descriptor(descriptor.path, flags | os.O_DIRECT)
    except StorageError:  # EINVAL if the file system lacks O_DIRECT; the buffered descriptor still works
        return None

    if os.path.samestat(os.fstat(direct.number), os.fstat(descriptor.number)):
        return direct

    direct.close()
    return None


_STATX_DIOALIGN: Final = 0x2000
_AT_EMPTY_PATH: Final = 0x1000


def memory_alignment(descriptor: int) -> int:
    """Return what addresses of memory must be multiples of, for direct transfers to and from a file.

    A page where the system does not say: Linux before 6.1, and most file systems of a network. A disk asks
    for less: 512 bytes, or 4.
    """
    call = c_function("statx", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    if call is None or sys.platform != "linux":
        return PAGE

    answer = (ctypes.c_uint32 * 64)()  # a `struct statx`
    if call(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(answer)) != 0:
        return PAGE

    said, memory_align = answer[0], answer[38]
    return int(memory_align) if said & _STATX_DIOALIGN and 0 < memory_align < PAGE else PAGE


@final
class _DirectDescriptor:
    """The file of a descriptor, opened a second time once bytes are to go past the page cache. Thread-safe.

    Not before: a checkpoint may have many files, and a process has few descriptors.
    """

    __slots__ = ("_direct", "_first", "_flags", "_io", "_lock", "is_refused", "memory_align")

    def __init__(self, first: Descriptor, flags: int, io: Io) -> None:
        self._first = first
        self._flags = flags
        self._io: Io = io
        self._lock = Lock()
        self._direct: Descriptor | None = None
        self.is_refused = io == "buffered"  #: whether no more bytes go past the page cache
        self.memory_align = PAGE  #: what an address must be a multiple of, once it is open

    def opened(self) -> Descriptor | None:
        """Return it; None if the file system refuses."""
        with self._lock:
            if self._direct is None and not self.is_refused:
                self._direct = open_direct(self._first, self._flags, self._io)
                self.is_refused = self._direct is None
                if self._direct is not None:
                    self.memory_align = memory_alignment(self._direct.number)

            return None if self.is_refused else self._direct

    def close(self) -> None:
        """Close it. Idempotent."""
        if self._direct is not None:
            self._direct.close()


def _buffered(nbytes: int) -> list[TransferPart]:
    return [TransferPart(nbytes, direct=False)] if nbytes else []


# The kernel pins a huge page at once; with 4 KiB pages a direct write took half as long again.
HUGE_PAGE = 2**21


@final
class Arena:
    """Blocks of memory for writing threads. Thread-safe.

    Blocks are reused, so there are never more of them than writing threads. All are freed when the last
    user leaves.

    Args:
        block_bytes: Length of a block, a multiple of the page size. The default is one huge page, which the
            system pins for a transfer in one step; with small pages a save takes half as long again.
    """

    __slots__ = ("_free", "_lock", "_n_users", "block_bytes")

    def __init__(self, block_bytes: int = HUGE_PAGE) -> None:
        self.block_bytes = block_bytes
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lock = Lock()
        self._n_users = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes in blocks that no thread uses now."""
        with self._lock:
            return len(self._free) * self.block_bytes

    def enter(self) -> None:
        """Count one more user. Blocks are kept as long as there are users."""
        with self._lock:
            self._n_users += 1

    def leave(self) -> None:
        """Count one user less. The last one to leave frees the blocks."""
        with self._lock:
            self._n_users -= 1
            if not self._n_users:
                self._free.clear()

    @contextmanager
    def block(self) -> Generator[npt.NDArray[np.uint8]]:
        """Give a block until the end of the context. Its content is undefined."""
        with self._lock:
            block = self._free.pop() if self._free else None

        block = _allocate(self.block_bytes) if block is None else block
        try:
            yield block
        finally:
            with self._lock:
                if self._n_users:
                    self._free.append(block)


def _allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    memory = np.frombuffer(anonymous_memory(nbytes + HUGE_PAGE, huge_pages=True), np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + nbytes]


# From <linux/magic.h>. Only local disks are listed: for network file systems the local page cache is worth
# using. An overlay supports direct transfers if the file system below it does.
EXT4: Final = 0xEF53
XFS: Final = 0x58465342
F2FS: Final = 0xF2F52010
OVERLAY: Final = 0x794C7630
DISKS: Final = frozenset({EXT4, XFS, F2FS, OVERLAY})

_CACHESTAT: Final = 451
_STATFS_BYTES: Final = 512  # larger than the structure on any platform; its first field is the type
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.ESPIPE})


def takes_direct_io(descriptor: int) -> bool:
    """Return whether an open file is on a local disk whose file system is faster with direct transfers."""
    if sys.platform != "linux":  # other systems answer in other structures
        return False

    call = c_function("fstatfs", ctypes.c_int, ctypes.c_char_p)
    if call is None:
        return False

    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if call(descriptor, answer) != 0:
        return False

    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF in DISKS


def allocate(descriptor: int, offset: int, nbytes: int) -> bool:
    """Reserve room in a file, and extend the file to include it. The new bytes read as zero.

    Returns:
        Whether it was done; False if the file system cannot. (`os.posix_fallocate` would then write zeros.)

    Raises:
        OSError: If there is no room: ENOSPC, EDQUOT, EFBIG.
    """
    call = c_function("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call is None:
        return False

    while call(descriptor, 0, offset, nbytes) != 0:
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))

    return True


def cached_bytes(descriptor: int, offset: int, nbytes: int) -> int | None:
    """Return how many bytes of a file range are in the page cache; None if the system cannot tell.

    Takes some 10 us for 16 MiB. The alternatives are worse: since Linux 5.10 a read with RWF_NOWAIT fills
    the page cache, and mincore takes forty times as long.
    """
    if sys.platform != "linux":  # the number is Linux's
        return None

    call = c_function(
        "syscall", ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long
    )
    if call is None:
        return None

    wanted = (ctypes.c_uint64 * 2)(offset, nbytes)
    answer = (ctypes.c_uint64 * 5)()  # pages: cached, dirty, in write-back, evicted, recently evicted
    if call(_CACHESTAT, descriptor, ctypes.byref(wanted), ctypes.byref(answer), 0) != 0:
        return None  # Linux before 6.5, or the file belongs to another user

    return int(answer[0]) * mmap.PAGESIZE


# The errors of a file system that opens a file with O_DIRECT but then refuses direct transfers.
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


@final
class LocalDataFile:
    """A file that is written at chosen offsets. Several threads may write to separate ranges at once.

    Large requests bypass the page cache where the file system allows it: they leave no dirty pages to be
    written back later, and their speed does not depend on how many pages are free. They are copied through
    a small arena unless they are aligned in memory as the disk asks.

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
        "_synced",
        "path",
        "transfers",
    )

    def __init__(
        self, path: str, io: Io, arena: Arena, synced: SyncedFiles | None = None, *, create: bool = True
    ) -> None:
        # O_EXCL, because two saves writing into one file would both be corrupted.
        self._descriptor = Descriptor(path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if create else 0))
        self._direct = _DirectDescriptor(self._descriptor, os.O_WRONLY, io)
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
            direct = None if nbytes < DIRECT_FROM else self._direct.opened()
            if direct is None:
                write_vectored(self._descriptor.number, offset, views)
            else:
                parts = parts_of(offset, nbytes, self._arena.block_bytes)
                runs = cut(views, [part.nbytes for part in parts])
                for part, run in zip(parts, runs, strict=True):
                    if part.direct and self._write_direct(direct, at, part.nbytes, run):
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
            # Room was reserved in large steps; a file has the length of its bytes.
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

        try:
            self._direct.close()
        finally:
            self._descriptor.close()

    def _write_direct(self, direct: Descriptor, offset: int, nbytes: int, views: list[memoryview]) -> bool:
        """Write whole pages past the page cache; return False if the file system refuses."""
        if self._direct.is_refused:
            return False
        try:
            # All other memory is copied into aligned blocks.
            if len(views) == 1 and self._is_aligned(views[0]):
                try:
                    write_vectored(direct.number, offset, views)
                except OSError as error:
                    if error.errno != errno.EINVAL or address_of(views[0]) % PAGE == 0:
                        raise

                    self._direct.memory_align = PAGE  # it asks for more than it says
                else:
                    return True

            with self._arena.block() as block:
                _gather(views, block)
                write_vectored(direct.number, offset, [block[:nbytes].data])
        except OSError as error:
            if error.errno not in _REFUSED:
                raise

            self._direct.is_refused = True
            return False

        return True

    def _is_aligned(self, view: memoryview) -> bool:
        return address_of(view) % self._direct.memory_align == 0

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
NEAR = 32 * 2**10
"""Bytes between two ranges that are read, too, by one call for both. A call of its own costs as much."""
BLOCK = 2 * 2**20
"""Bytes of a large request that are read from the page cache, and summed, at a time: the caches hold them."""


@final
class LocalReadableFile:
    """An existing file, read at chosen offsets by several threads at once.

    In a large request, windows that are mostly in the page cache are copied from there. The others are read
    directly into the buffers where the file system and the alignment allow it, else through the page cache.

    Args:
        path: Path of the file.
        io: "auto" is described above; "direct" ignores the page cache; "buffered" always reads through it.
    """

    __slots__ = ("_descriptor", "_direct", "_io", "_lock", "path", "transfers")

    def __init__(self, path: str, io: Io) -> None:
        self._descriptor = Descriptor.of_regular(path)
        self._direct = _DirectDescriptor(self._descriptor, os.O_RDONLY, io)
        self._io: Io = io
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

    def read_runs(self, offsets: Iterable[int], nbytes: int, buffer: memoryview) -> None:
        """Read ranges of one length through the page cache; see `ReadsRuns`.

        A call fetches neighbours together. What is between them goes to memory that stays in the cache of
        the processor: it costs half of a copy, and no turn for the interpreter, for which threads wait longer
        than for the bytes.
        """
        number, unused = self._descriptor.number, memoryview(bytearray(NEAR))
        at, start, end, views = 0, 0, -NEAR - 1, list[memoryview]()
        with translated("read", self.path):
            for offset in chain(offsets, [sys.maxsize]):
                if not 0 <= offset - end <= NEAR or len(views) + 2 > MAX_BUFFERS:
                    if views and os.preadv(number, views, start) != end - start:  # as a signal may have it
                        self._read_again(start, views)
                    if offset == sys.maxsize:
                        break

                    start, views = offset, []
                elif offset > end:
                    views.append(unused[: offset - end])

                views.append(buffer[at : at + nbytes])
                at, end = at + nbytes, offset + nbytes

        with self._lock:
            self.transfers += Transfers(buffered_bytes=at)

    def _read_again(self, offset: int, views: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, views))
        if transfer(os.preadv, self._descriptor.number, offset, views) < end:
            raise self._truncated(end)

    def close(self) -> None:
        """Close the file. Idempotent."""
        try:
            self._direct.close()
        finally:
            self._descriptor.close()

    def _read(self, offset: int, views: Sequence[memoryview]) -> int:
        """Read through the page cache, and return the offset reached."""
        reached = transfer(os.preadv, self._descriptor.number, offset, views)
        with self._lock:
            self.transfers += Transfers(buffered_bytes=reached - offset)

        return reached

    def _read_large(self, offset: int, view: memoryview, summed: _Summed | None = None) -> int:
        """Read each part directly or through the page cache, and return the offset reached."""
        parts = [TransferPart(len(view), direct=False)]
        if not self._direct.is_refused and (offset - address_of(view)) % PAGE == 0:
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
                at = self._read_by_blocks(at, rest, summed)
            if at < end:
                break

        return at

    def _read_by_blocks(self, offset: int, view: memoryview, summed: _Summed | None) -> int:
        """Read through the page cache block by block, and return the offset reached."""
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            make_pages(block)
            moved = self._read(offset + start, [block]) - offset - start
            if summed is not None:
                summed.add(block[:moved])
            if moved < len(block):
                return offset + start + moved

        return offset + len(view)

    def _truncated(self, needed: int) -> TruncatedDataError:
        return TruncatedDataError(self.path, needed, os.fstat(self._descriptor.number).st_size)

    def _is_wanted_directly(self, offset: int, nbytes: int) -> bool:
        if self._direct.is_refused or self._io != "auto":
            return not self._direct.is_refused

        cached = cached_bytes(self._descriptor.number, offset, nbytes)
        return cached is not None and 2 * cached < nbytes

    def _read_direct(self, offset: int, view: memoryview) -> int:
        """Read past the page cache. Return the number of bytes read, 0 if the file does not allow it."""
        try:
            direct = self._direct.opened()
            moved = 0 if direct is None else os.preadv(direct.number, [view], offset)
        except OSError:  # a read through the page cache follows, which succeeds or reports the error
            self._direct.is_refused = True
            return 0

        with self._lock:
            self.transfers += Transfers(direct_bytes=moved)

        return moved


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
