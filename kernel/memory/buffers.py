"""Fresh memory from the system, allocated without blocking the interpreter's other threads."""

from __future__ import annotations

__all__ = (
    "MAPPED_FROM",
    "UsedMemory",
    "anonymous_memory",
    "file_memory",
    "give_back_freed_memory",
    "huge_pages_are_cheap",
    "is_mapped",
    "make_pages",
    "scratch_memory",
)

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple, cast, final

_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages by advice
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED: Final = ctypes.c_void_p(-1).value


MAPPED_FROM: Final = 2**20
"""From this many bytes on, a copy gets a mapping of its own. The allocator keeps freed blocks below 32 MiB
in a pool for each thread: hundreds of megabytes that nobody has leased."""


def anonymous_memory(nbytes: int, *, huge_pages: bool = False) -> memoryview:
    """Return `nbytes` of zeroed memory that begins on a page; it goes back to the system with its last view.

    A mapping waits while other threads touch fresh memory for the first time, which took up to
    90 ms here. The call of the `mmap` module keeps the interpreter locked all the while, and so stops
    the event loop; a foreign call does not.

    Args:
        nbytes: Positive.
        huge_pages: Whether to ask for them.

    Raises:
        MemoryError, OSError: If there is none.
    """
    if sys.platform != "linux":
        return _mapped(nbytes, huge_pages)

    calls = _calls()
    if calls is None:
        return _mapped(nbytes, huge_pages)

    address = calls.map(None, nbytes, _READ_WRITE, _PRIVATE, -1, 0)
    if address in {None, _FAILED}:
        raise MemoryError(f"cannot map {nbytes} bytes")

    memory = (ctypes.c_ubyte * nbytes).from_address(cast("int", address))
    weakref.finalize(memory, calls.unmap, address, nbytes).atexit = False
    if huge_pages:
        calls.advise(address, nbytes, mmap.MADV_HUGEPAGE)  # a kernel without them refuses

    return memoryview(memory).cast("B")


_REPORTED: Final = "/sys/module/page_reporting/parameters/page_reporting_order"
_LARGEST_ORDER: Final = 32  #: of a block of pages; the kernel has a greater number there if it reports none


@cache
def huge_pages_are_cheap() -> bool:
    """Return whether they are also for memory that is filled once; False in a machine that returns them.

    A virtual machine that reports free memory to its host returns blocks of huge pages. The next touch of
    one waits for the host, 3 to 7 ms. Of free memory in smaller pieces, most was not returned: 512 small
    pages take 1.6 ms, and a huge one that was not returned 0.2 to 0.4 ms.
    """
    try:
        with open(_REPORTED, encoding="ascii") as file:
            return not 0 <= int(file.read()) <= _LARGEST_ORDER
    except (OSError, ValueError):
        return True


def scratch_memory(nbytes: int) -> memoryview:
    """Return memory for bytes that are copied out soon; from `MAPPED_FROM` on it begins on a page."""
    if nbytes < MAPPED_FROM:
        return memoryview(bytearray(nbytes))

    return anonymous_memory(nbytes, huge_pages=huge_pages_are_cheap())


@final
class UsedMemory:
    """Memory that is used again as soon as its last view is gone: fresh pages cost as much as a copy.

    For any thread.

    Args:
        most: Bytes up to which memory is kept for later, together with what is in use then. More may be in
            use.
        huge_pages: Whether to ask for them also where they are not cheap: for memory of which much was given
            back a moment ago.
    """

    __slots__ = ("_free", "_given_back", "_huge_pages", "_lock", "_most", "_n_free", "_n_used")

    def __init__(self, most: int, *, huge_pages: bool = False) -> None:
        self._most = most
        self._huge_pages = huge_pages or huge_pages_are_cheap()
        self._free: dict[int, list[memoryview]] = {}  # by length
        self._n_free = self._n_used = 0
        self._given_back = deque[memoryview]()  # and not looked at yet
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        """Return memory with anything in it; from `MAPPED_FROM` on it begins on a page."""
        if nbytes < MAPPED_FROM:
            return memoryview(bytearray(nbytes))

        with self._lock:
            self._sort()
            known = self._free.get(nbytes)
            found = known.pop() if known else None
            self._n_used += nbytes
            if found is not None:
                self._n_free -= nbytes

            unused = self._dropped()

        del unused  # not under the lock: the system takes its time
        memory = found
        try:
            if memory is None:
                memory = anonymous_memory(nbytes, huge_pages=self._huge_pages)

            lent = (ctypes.c_ubyte * nbytes).from_buffer(memory)  # another object for each use
        except BaseException:
            with self._lock:
                self._n_used -= nbytes

            raise

        weakref.finalize(lent, self._give_back, memory).atexit = False
        return memoryview(lent).cast("B")

    def _give_back(self, memory: memoryview) -> None:
        # Called by the collector, in any thread, also in one that holds the lock: it never waits for that.
        self._given_back.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._sort()
            finally:
                self._lock.release()

    def _sort(self) -> None:
        """Keep what was given back, if it is not too much, or let it go."""
        while self._given_back:
            memory = self._given_back.popleft()
            self._n_used -= len(memory)
            if self._n_used + self._n_free + len(memory) <= self._most:
                self._free.setdefault(len(memory), []).append(memory)
                self._n_free += len(memory)

    def _dropped(self) -> list[memoryview]:
        """Take out and return what cannot be kept any more."""
        found: list[memoryview] = []
        for nbytes, known in self._free.items():
            while known and self._n_used + self._n_free > self._most:
                found.append(known.pop())
                self._n_free -= nbytes

        return found

    def clear(self) -> None:
        """Return what is not used to the system, and keep no more."""
        with self._lock:
            self._most, self._n_free = 0, 0
            self._free.clear()


def file_memory(descriptor: int, nbytes: int, *, writable: bool = False) -> memoryview:
    """Return the bytes of an open file, mapped: read-only unless it is to be written, and shared.

    The mapping keeps no descriptor open, as one of the `mmap` module does before Python 3.13.

    Args:
        descriptor: Of the file, which may be closed afterwards.
        nbytes: Its length; positive.
        writable: Whether it is to be written. Then all of it has pages, and they are mapped at once.

    Raises:
        OSError: If it cannot be mapped.
    """
    access, flags = mmap.PROT_READ, mmap.MAP_SHARED
    calls = None
    if sys.platform == "linux":
        calls = _calls()
        if writable:
            flags |= mmap.MAP_POPULATE
    if writable:
        access |= mmap.PROT_WRITE
    if calls is None:
        return memoryview(mmap.mmap(descriptor, nbytes, flags, access))

    address = calls.map(None, nbytes, access, flags, descriptor, 0)
    if address in {None, _FAILED}:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

    memory = (ctypes.c_ubyte * nbytes).from_address(cast("int", address))
    weakref.finalize(memory, calls.unmap, address, nbytes).atexit = False
    view = memoryview(memory).cast("B")
    return view if writable else view.toreadonly()


_POPULATE_WRITE: Final = 23  # Linux 5.14; the `mmap` module has no name for it


def make_pages(memory: memoryview) -> None:
    """Have the system make the pages of memory that is about to be filled, by one call. Blocking.

    Otherwise a read makes each page when it meets it, by a fault of its own. Does nothing if the first page
    is there, or the system cannot. Give it little at a time: the processor's cache still has that when it
    is filled.

    Args:
        memory: Writable bytes. All of it will be overwritten.
    """
    calls = _calls() if sys.platform == "linux" else None
    if calls is None or len(memory) < mmap.PAGESIZE:
        return

    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (address + len(memory) - start) // mmap.PAGESIZE * mmap.PAGESIZE
    is_there = ctypes.c_ubyte(1)
    if (
        nbytes
        and calls.resident(start, mmap.PAGESIZE, ctypes.byref(is_there)) == 0
        and not is_there.value & 1
    ):
        calls.advise(start, nbytes, _POPULATE_WRITE)  # if it fails, faults make them


def give_back_freed_memory() -> None:
    """Have the allocator return freed memory to the system, if it can.

    It locks its pools for that, one after the other: a few milliseconds.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def is_mapped(owner: object) -> bool:
    """Return whether bytes are in a mapping, which goes back to the system with its last view."""
    while owner is not None:
        if isinstance(owner, (ctypes.Array, mmap.mmap)):
            return True

        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)

    return False


def _mapped(nbytes: int, huge_pages: bool) -> memoryview:
    mapping = mmap.mmap(-1, nbytes, flags=_PRIVATE)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)

    return memoryview(mapping)


@cache
def _trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim  # glibc's
    except (OSError, AttributeError):
        return None

    trim.argtypes = (ctypes.c_size_t,)
    return cast("Callable[[int], int]", trim)


class _Calls(NamedTuple):
    """Functions of the C library."""

    map: Callable[..., Any]
    unmap: Callable[..., Any]
    advise: Callable[..., Any]
    resident: Callable[..., Any]


@cache
def _calls() -> _Calls | None:
    try:
        library = ctypes.CDLL(None, use_errno=True)
        map_, unmap, advise, resident = library.mmap64, library.munmap, library.madvise, library.mincore
    except (OSError, AttributeError):
        return None

    size, offset = ctypes.c_size_t, ctypes.c_int64
    map_.restype = ctypes.c_void_p
    map_.argtypes = (ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset)
    unmap.argtypes = (ctypes.c_void_p, size)
    advise.argtypes = (ctypes.c_void_p, size, ctypes.c_int)
    resident.argtypes = (ctypes.c_void_p, size, ctypes.c_void_p)
    return _Calls(map_, unmap, advise, resident)
