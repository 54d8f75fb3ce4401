"""A leaf on its way into another order, in a temporary file.

A slab of a transposed leaf needs a little of each row that is stored. To read every slab by itself would read
the leaf once for each. So the leaf is first written in blocks: each is made of stored elements that are next
to each other, and has them in their new order. A slab then is one range of each block. The leaf is read once
and written once more than it would be otherwise, however little memory there is (Aggarwal and Vitter, "The
Input/Output Complexity of Sorting", 1988).
"""

from __future__ import annotations

__all__ = ("Spill",)

import itertools
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from threading import Condition
from typing import Final, final

import numpy as np

from penstock.handlers.formats.region_reads import Bounds, StoredChunk, chunk_reads, chunks_in, merge_direct
from penstock.handlers.stores.regular_files import transfer, translated, write_vectored
from penstock.kernel.concurrency.threads import end_if_cancelled
from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.reads import Destination, DirectRead, ScatterRead

_LOOKS_EACH_S: Final = 0.1  #: between two looks whether the caller waits no longer


@final
class Spill:
    """A leaf that is written in blocks when the first part of it is asked for. For any thread.

    Several threads that ask at once write it together. The file has no name, and goes with this object.

    Args:
        bounds: Of the part of the leaf that will be asked for.
        itemsize: Bytes of an element.
        block: The shape of a block; those at the ends of axes are smaller.
        directory: Where the file is; None for the system's.
        read: Makes the block with these bounds, in C order. Blocking.
    """

    def __init__(
        self,
        bounds: Bounds,
        itemsize: int,
        block: Sequence[int],
        directory: str | None,
        read: Callable[[Bounds], memoryview],
    ) -> None:
        self._whole, self._itemsize, self._block = bounds, itemsize, tuple(block)
        self._counts = tuple([-(-(hi - lo) // step) for (lo, hi), step in zip(bounds, block, strict=True)])
        self._directory = directory or tempfile.gettempdir()
        self._read = read
        self._file = -1  #: its descriptor
        self._ahead: Iterator[tuple[int, ...]] = itertools.product(*map(range, self._counts))
        self._n_left = math.prod(self._counts)
        self._failure: BaseException | None = None
        self._changed = Condition()

    def fill(self, region: Destination, piece_bytes: int) -> None:
        """Fill a region within the bounds. Blocking.

        Raises:
            StorageError: If the file cannot be written, as on a full disk.
            PenstockError: What `read` raises.
        """
        self._write()
        places = zip(region.bounds, self._whole, strict=True)
        within = tuple([(lo - first, hi - first) for (lo, hi), (first, _) in places])
        reads = itertools.chain.from_iterable(
            chunk_reads(0, self._chunk(place), region, piece_bytes)
            for place in itertools.product(*itertools.starmap(range, chunks_in(within, self._block)))
        )
        for read in merge_direct(reads):
            if isinstance(read, DirectRead):
                self._read_at(read.offset, read.into())
            elif isinstance(read, ScatterRead):
                buffer = np.empty(read.nbytes, np.uint8).data
                self._read_at(read.offset, buffer)
                read.scatter(buffer)

    def _chunk(self, place: tuple[int, ...]) -> StoredChunk:
        """Return the block at a place of the grid; all have room for a whole one."""
        number = 0
        for at, count in zip(place, self._counts, strict=True):
            number = number * count + at

        bounds = self._bounds(place)
        start, sizes = tuple([lo for lo, _ in bounds]), tuple([hi - lo for lo, hi in bounds])
        offset = number * math.prod(self._block) * self._itemsize
        return StoredChunk("", offset, start, sizes, self._itemsize)

    def _bounds(self, place: tuple[int, ...]) -> Bounds:
        axes = zip(place, self._block, self._whole, strict=True)
        return tuple([(lo + at * step, min(lo + at * step + step, hi)) for at, step, (lo, hi) in axes])

    def _write(self) -> None:
        """Return once all blocks are written, some of them by this thread."""
        while True:
            with self._changed:
                place = None if self._failure is not None else next(self._ahead, None)
                if place is None:
                    break
                if self._file < 0:
                    self._create()

            try:
                end_if_cancelled()
                data = self._read(self._bounds(place))
                with translated("write a temporary file in", self._directory):
                    write_vectored(self._file, self._chunk(place).offset, [data])
            except BaseException as failure:
                self._note(failure)
                raise

            self._note(None)

        with self._changed:
            while self._n_left and self._failure is None:
                self._changed.wait(_LOOKS_EACH_S)
                end_if_cancelled()

            if self._failure is not None:
                raise self._failure

    def _create(self) -> None:
        with (
            translated("create a temporary file in", self._directory),
            tempfile.TemporaryFile(dir=self._directory) as file,
        ):
            self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file).atexit = False

    def _note(self, failure: BaseException | None) -> None:
        with self._changed:
            self._n_left -= 1
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _read_at(self, offset: int, buffer: memoryview) -> None:
        with translated("read a temporary file in", self._directory):
            if transfer(os.preadv, self._file, offset, [buffer]) < offset + len(buffer):
                raise StorageError("read", self._directory, "a temporary file ends before what was written")
