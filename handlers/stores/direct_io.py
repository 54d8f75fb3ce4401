"""Decides which bytes of a request may bypass the page cache, and makes the calls for it that Python lacks.

These are `fallocate` without emulation, `fstatfs` and `cachestat` of Linux.
"""

from __future__ import annotations

__all__ = (
    "DIRECT_FROM",
    "PAGE",
    "Arena",
    "Io",
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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Final, Literal, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.stores.regular_files import Descriptor
from penstock.kernel.errors import StorageError
from penstock.kernel.memory.buffers import anonymous_memory

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


def _buffered(nbytes: int) -> list[TransferPart]:
    return [TransferPart(nbytes, direct=False)] if nbytes else []


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
    call = _find("fstatfs", ctypes.c_int, ctypes.c_char_p)
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
    call = _find("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
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
    call = _find("syscall", ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    if call is None:
        return None

    wanted = (ctypes.c_uint64 * 2)(offset, nbytes)
    answer = (ctypes.c_uint64 * 5)()  # pages: cached, dirty, in write-back, evicted, recently evicted
    if call(_CACHESTAT, descriptor, ctypes.byref(wanted), ctypes.byref(answer), 0) != 0:
        return None  # Linux before 6.5, or the file belongs to another user

    return int(answer[0]) * mmap.PAGESIZE


@cache
def _find(name: str, *argument_types: type) -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None  # the C library lacks the function

    call.argtypes = argument_types
    call.restype = ctypes.c_int
    found: Callable[..., int] = call
    return found
