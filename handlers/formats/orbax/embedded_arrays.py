"""Arrays whose bytes are within a document, such as the msgpack file of early Orbax, or JSON.

Their bytes are in C order, in one run or several, or few enough to be at hand.
"""

from __future__ import annotations

__all__ = ("ElementRun", "PackedArray", "number", "packed_reads")

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.region_reads import (
    StoredChunk,
    chunk_reads,
    overlaps,
    with_checksums,
)
from penstock.kernel.protocols.reads import Destination, Read, ScatterRead
from penstock.kernel.rectangles import rectangles


@final
@dataclass(frozen=True, slots=True)
class ElementRun:
    """Elements that follow one another in a file."""

    first: int  #: index of the first one in the array, in C order
    count: int
    offset: int  #: of the first one in the file, bytes


@final
@dataclass(frozen=True, slots=True)
class PackedArray:
    """An array within a document: `StoredLeaf.detail` of a leaf of Orbax's layout."""

    file: str  #: the document, absolute
    shape: tuple[int, ...]
    dtype: str  #: by name
    runs: tuple[ElementRun, ...] = ()  #: together they hold every element once, if it is not at hand
    data: bytes | None = None  #: all of it, where it is a single number

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the document."""
        if self.data is not None:
            return len(self.data)

        return sum([run.count for run in self.runs]) * numpy_dtype(self.dtype).itemsize


def number(file: str, value: complex) -> PackedArray | None:
    """Make the array of a number that was found in a document; None for an int beyond 64 bits."""
    match value:
        case bool():
            return PackedArray(file, (), "bool", data=bytes([value]))
        case int() if -(1 << 63) <= value < 1 << 63:
            return PackedArray(file, (), "int64", data=struct.pack("<q", value))
        case int() if 0 <= value < 1 << 64:
            return PackedArray(file, (), "uint64", data=struct.pack("<Q", value))
        case int():
            return None
        case float():
            return PackedArray(file, (), "float64", data=struct.pack("<d", value))
        case complex():
            return PackedArray(file, (), "complex128", data=struct.pack("<dd", value.real, value.imag))


def packed_reads(leaf: int, array: PackedArray, region: Destination, piece_bytes: int) -> Iterator[Read]:
    """Plan the reads that fill `region`, which has elements; see `StoredCheckpoint.reads`."""
    if array.data is not None:
        yield ScatterRead(leaf, array.file, 0, 0, partial(_fill, region, array.data))
        return

    itemsize = numpy_dtype(array.dtype).itemsize
    for run in array.runs:
        for first, start, shape in rectangles(array.shape, run.first, run.first + run.count):
            chunk = StoredChunk(
                array.file, run.offset + (first - run.first) * itemsize, start, shape, itemsize
            )
            if overlaps(region.bounds, start, shape):
                yield from with_checksums(chunk_reads(leaf, chunk, region, piece_bytes), {}, piece_bytes)


def _fill(region: Destination, data: bytes, _: memoryview) -> None:
    region.view()[:] = data
