"""Host memory that a restore reads into, and that the restored value may keep."""

from __future__ import annotations

__all__ = ("HostRegion",)

import math
import sys
from collections.abc import Sequence
from threading import Lock
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.kernel.memory.buffers import anonymous_memory

_CACHE_LINE = 64  # the alignment jax needs to use a buffer in place on a CPU device
_PAGE = 4096  # the alignment O_DIRECT needs
_HUGE_PAGE = 1 << 21
_PAGE_ALIGNED_FROM = 1 << 16
_HUGE_FROM = 2 * _HUGE_PAGE


@final
class HostRegion:
    """The kernel's `Destination`: a buffer for one rectangular part of a global array.

    The memory is allocated on first access. It is never reused, so the restored value may keep it. It is
    aligned to 64 bytes, and from 64 KiB on to 4096. From 4 MiB on it is in huge pages, if the system has
    them, and so it is if the region was joined with others.

    Args:
        bounds: (start, stop) along each axis of the global array; `()` for a 0-d array.
        dtype: Dtype of the elements, in native byte order.
    """

    __slots__ = ("_array", "_joined", "_lock", "bounds", "dtype", "nbytes", "shape")

    def __init__(self, bounds: tuple[tuple[int, int], ...], dtype: np.dtype[Any]) -> None:
        self.bounds = bounds
        self.dtype = dtype
        self.shape = tuple([stop - start for start, stop in bounds])  # a generator takes twice as long
        self.nbytes = math.prod(self.shape) * dtype.itemsize
        self._lock = Lock()
        self._array: npt.NDArray[Any] | None = None
        self._joined: tuple[_Joined, int] | None = None  # and where in it

    @classmethod
    def whole(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostRegion:
        """Return one region for the whole array."""
        return cls(tuple([(0, size) for size in shape]), dtype)

    def adopt(self, memory: memoryview) -> None:
        """Use these bytes, read-only, instead of allocating memory. Call it before the first access."""
        with self._lock:
            assert self._array is None, "the region has memory already"
            self._array = np.frombuffer(memory, np.uint8).view(self.dtype).reshape(self.shape)

    def join(self, others: Sequence[HostRegion], /) -> None:
        """Put this region and the others, in order, each on a page, into one allocation of huge pages."""
        at = 0
        joined = _Joined(sum([_in_pages(region.nbytes) for region in (self, *others)]))
        for region in (self, *others):
            region._joined = joined, at
            at += _in_pages(region.nbytes)

    def view(self) -> memoryview:
        """The memory as writable, contiguous bytes in C order. Thread-safe."""
        return self.array().reshape(-1).view(np.uint8).data

    def array(self) -> npt.NDArray[Any]:
        """The same memory as an array of `shape` and `dtype`; the same object each time. Thread-safe."""
        array = self._array
        if array is None:
            with self._lock:
                array = self._array
                if array is None:
                    array = self._array = self._memory().view(self.dtype).reshape(self.shape)

        return array

    def _memory(self) -> npt.NDArray[np.uint8]:
        if self._joined is None:
            return _allocate(self.nbytes)

        joined, at = self._joined
        return joined.memory()[at : at + self.nbytes]

    def let_go(self) -> None:
        """Drop the memory, which is freed with its last view. Call it only when nothing writes to it."""
        self._array = None

    def __repr__(self) -> str:
        state = "not allocated" if self._array is None else "allocated"
        return f"HostRegion({self.bounds}, {self.dtype.name}, {state})"


@final
class _Joined:
    """One allocation for several regions, made on first access. It lives as long as the arrays in it."""

    __slots__ = ("_lock", "_memory", "_nbytes")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._lock = Lock()
        self._memory: npt.NDArray[np.uint8] | None = None

    def memory(self) -> npt.NDArray[np.uint8]:
        """The memory, page-aligned; the same each time. Thread-safe."""
        with self._lock:
            if self._memory is None:
                self._memory = _allocate(self._nbytes)

            return self._memory


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return uninitialised, aligned memory.

    Huge pages halve the time to fill it; without them every 4 KiB costs a page fault (ARCHITECTURE §5).
    """
    if sys.platform == "linux" and nbytes >= _HUGE_FROM:
        whole = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        memory = np.frombuffer(anonymous_memory(whole, huge_pages=True), np.uint8)
        if memory.ctypes.data % _HUGE_PAGE:  # Linux before 6.7 does not align it by itself
            memory = np.frombuffer(anonymous_memory(whole + _HUGE_PAGE, huge_pages=True), np.uint8)

        return _aligned(memory, nbytes, _HUGE_PAGE)

    alignment = _PAGE if nbytes >= _PAGE_ALIGNED_FROM else _CACHE_LINE
    return _aligned(np.empty(nbytes + alignment, np.uint8), nbytes, alignment)


def _aligned(memory: npt.NDArray[np.uint8], nbytes: int, alignment: int) -> npt.NDArray[np.uint8]:
    start = -memory.ctypes.data % alignment
    return memory[start : start + nbytes]
