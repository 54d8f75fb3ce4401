"""Parts of an array that are contiguous in C order, and the host memory that they are copied to and from."""

from __future__ import annotations

__all__ = (
    "Box",
    "HostRegion",
    "boxes",
    "cast_to",
    "chunk_boxes",
    "flat_index",
    "is_contiguous",
    "shared_views",
    "stored_as",
)

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.handlers.dtypes import numpy_dtype
from penstock.kernel.memory.buffers import MAPPED_FROM, anonymous_memory, huge_pages_are_cheap
from penstock.kernel.protocols.reads import SharedRead


@final
@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of an array that is one flat range of its elements in C order."""

    starts: tuple[int, ...]  #: along each axis
    sizes: tuple[int, ...]  #: along each axis
    first: int  #: flat index of its first element in the array that is cut, in C order

    @property
    def n_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


def boxes(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Cut an array of `shape` into boxes, in C order, that together cover each element once.

    One axis is cut into nearly equal steps, the axes before it into single indices, and those after it
    not at all. So boxes have at most two different shapes, and few programs need to be compiled.

    Args:
        shape: Shape of the array; if an axis is empty there are no boxes.
        most: The most elements a box may have, at least 1.
    """
    if 0 in shape:
        return

    axis, inner = _cut_axis(shape, most)
    if axis < 0:
        yield Box((0,) * len(shape), shape, 0)
        return

    length, tail = shape[axis], shape[axis + 1 :]
    n_steps = -(-length // min(length, most // inner))
    step = -(-length // n_steps)
    for row, outer in enumerate(itertools.product(*map(range, shape[:axis]))):
        for at in range(0, length, step):
            starts = (*outer, at, *(0,) * len(tail))
            sizes = (*(1,) * axis, min(step, length - at), *tail)
            yield Box(starts, sizes, (row * length + at) * inner)


def flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The position of an element in C order."""
    flat = 0
    for at, size in zip(index, shape, strict=True):
        flat = flat * size + at

    return flat


def is_contiguous(box: Box, shape: tuple[int, ...]) -> bool:
    """Return whether the elements of a box are contiguous in an array of `shape`, in C order."""
    axis = len(shape)
    while axis and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1

    return math.prod(box.sizes[: max(axis - 1, 0)]) == 1


def _cut_axis(shape: tuple[int, ...], most: int) -> tuple[int, int]:
    """Return the axis to cut, or -1 if the whole array fits, and how many elements one index of it has."""
    inner = 1
    for axis in reversed(range(len(shape))):
        if inner * shape[axis] > most:
            return axis, inner

        inner *= shape[axis]

    return -1, inner


def chunk_boxes(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...], most: int
) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Cut an array into chunks, and each chunk into boxes that are flat ranges of it in C order.

    Args:
        shape: Shape of the array; if an axis is empty there are no boxes.
        chunk_shape: Divides `shape` evenly.
        most: The most elements a box may have, at least 1.

    Yields:
        The grid index of the chunk, and a box whose `starts` count from the array's origin and whose
        `first` counts from the chunk's.
    """
    if 0 in shape:
        return
    if shape == chunk_shape:
        chunk = (0,) * len(shape)
        for box in boxes(shape, most):
            yield chunk, box

        return

    counts = [size // part for size, part in zip(shape, chunk_shape, strict=True)]
    within = list(boxes(chunk_shape, most))
    for chunk in itertools.product(*map(range, counts)):
        corner = [at * part for at, part in zip(chunk, chunk_shape, strict=True)]
        for box in within:
            starts = tuple([at + start for at, start in zip(corner, box.starts, strict=True)])
            yield chunk, replace(box, starts=starts)


@lru_cache(maxsize=256)
def stored_as(dtype: str) -> np.dtype[Any]:
    """The dtype named `dtype` in its stored byte order, little-endian."""
    return numpy_dtype(dtype).newbyteorder("<")


def cast_to(array: npt.NDArray[Any], dtype: str | np.dtype[Any], *, copy: bool = False) -> npt.NDArray[Any]:
    """Return the elements in C order, converted to `dtype` by C's rules.

    Args:
        array: An array of any strides and byte order.
        dtype: The dtype, or its name for the little-endian one.
        copy: Whether the result must not share the array's memory.
    """
    wanted = stored_as(dtype) if isinstance(dtype, str) else dtype
    host = np.asarray(array)
    with np.errstate(all="ignore"):  # values out of range are converted as C converts them
        if not copy or host.size * wanted.itemsize < MAPPED_FROM:
            return host.astype(wanted, order="C", copy=copy)

        memory = anonymous_memory(host.size * wanted.itemsize, huge_pages=True)
        made = np.frombuffer(memory, wanted).reshape(host.shape)
        np.copyto(made, host, casting="unsafe")
        return made


def shared_views(shared: SharedRead) -> Iterator[npt.NDArray[Any]]:
    """Yield a view of the shared buffer for each leaf, with its stored shape and dtype.

    Consecutive leaves of one kind without gaps are cut from one larger view, which is faster.
    """
    specs, sizes, starts, data = shared.specs, shared.sizes, shared.buffer.starts, shared.buffer.data
    at = 0
    for _, group in itertools.groupby(specs, key=id):
        stop = at + len(list(group))
        spec, nbytes = specs[at], sizes[at]
        shape, dtype = spec.shape or (), numpy_dtype(spec.dtype)
        if (
            shape
            and nbytes
            and starts[at:stop] == list(range(starts[at], starts[at] + nbytes * (stop - at), nbytes))
        ):
            yield from np.ndarray((stop - at, *shape), dtype, data, starts[at])
        else:
            yield from [np.ndarray(shape, dtype, data, start) for start in starts[at:stop]]

        at = stop


_CACHE_LINE = 64  # the alignment jax needs to use a buffer in place on a CPU device
_PAGE = 4096  # the alignment O_DIRECT needs
# Faults of 4 KiB pages cost a restore a factor of six: large buffers begin on huge pages.
_HUGE_PAGE = 1 << 21
# Smaller ones are packed: a page of padding for each would cost more than it gains.
_PAGE_ALIGNED_FROM = 1 << 16
_HUGE_FROM = 2 * _HUGE_PAGE


@final
class HostRegion:
    """The kernel's `Destination`: a buffer for one rectangular part of a global array.

    The memory is allocated on first access. It is never reused, so the restored value may keep it. It is
    aligned to 64 bytes, and from 64 KiB on to 4096. From 4 MiB on it is in huge pages where they are
    cheap, and so it is if the region was joined with others.

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

    def fresh(self) -> HostRegion:
        """Return a region for the same part, with memory that it alone has."""
        return HostRegion(self.bounds, self.dtype)

    def adopt(self, memory: memoryview) -> None:
        """Use these bytes instead of allocating memory. Call it before the first access."""
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

    Huge pages halve the time to fill it, where they are cheap: without them every 4 KiB costs a page fault.
    """
    if sys.platform == "linux" and nbytes >= _HUGE_FROM:
        whole = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        huge = huge_pages_are_cheap()
        memory = np.frombuffer(anonymous_memory(whole, huge_pages=huge), np.uint8)
        if memory.ctypes.data % _HUGE_PAGE:  # Linux before 6.7 does not align it by itself
            memory = np.frombuffer(anonymous_memory(whole + _HUGE_PAGE, huge_pages=huge), np.uint8)

        return _aligned(memory, nbytes, _HUGE_PAGE)

    alignment = _PAGE if nbytes >= _PAGE_ALIGNED_FROM else _CACHE_LINE
    return _aligned(np.empty(nbytes + alignment, np.uint8), nbytes, alignment)


def _aligned(memory: npt.NDArray[np.uint8], nbytes: int, alignment: int) -> npt.NDArray[np.uint8]:
    start = -memory.ctypes.data % alignment
    return memory[start : start + nbytes]
