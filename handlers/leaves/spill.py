"""A leaf on its way into another order, in a temporary file.

A slab of a transposed leaf needs a little of each row that is stored. To read every slab by itself would read
the leaf once for each. So the leaf is first written in blocks: each is made of stored elements that are next
to each other, and has them in their new order. A slab then is one range of each block. The leaf is read once
and written once more than it would be otherwise, however little memory there is (Aggarwal and Vitter, "The
Input/Output Complexity of Sorting", 1988).

It is written and read past the page cache where the file system allows that: each byte is used once, and
pages of the cache that are touched for the first time would cost more than the disk does.
"""

from __future__ import annotations

__all__ = ("Spill",)

import itertools
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Condition
from typing import Final, final

from penstock.handlers.formats.region_reads import Bounds, StoredChunk, chunk_reads, chunks_in, merge_direct
from penstock.handlers.stores.data_file import DIRECT_FROM, PAGE, address_of, allocate, takes_direct_io
from penstock.handlers.stores.regular_files import transfer, translated, write_vectored
from penstock.kernel.concurrency.threads import end_if_cancelled
from penstock.kernel.errors import StorageError
from penstock.kernel.memory.buffers import anonymous_memory
from penstock.kernel.protocols.reads import Destination, DirectRead, ScatterRead

_LOOKS_EACH_S: Final = 0.1  #: between two looks whether the caller waits no longer
_AT_ONCE: Final = 2**20  #: bytes of a long range that are read by one call


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
        nbytes = math.prod(block) * itemsize
        self._is_direct = nbytes >= DIRECT_FROM
        self._room = -(-nbytes // PAGE) * PAGE if self._is_direct else nbytes  #: from one block to the next
        self._directory = directory or tempfile.gettempdir()
        self._read = read
        self._file = self._direct = -1  #: descriptors; the second is past the page cache
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
        found = itertools.chain.from_iterable(
            chunk_reads(0, self._chunk(place), region, piece_bytes)
            for place in itertools.product(*itertools.starmap(range, chunks_in(within, self._block)))
        )
        reads = [read for read in merge_direct(found) if isinstance(read, DirectRead | ScatterRead)]
        most = max([read.nbytes for read in reads if isinstance(read, ScatterRead)], default=0)
        room = anonymous_memory(max(most, _AT_ONCE) + 2 * PAGE)
        for read in reads:
            end_if_cancelled()
            if isinstance(read, ScatterRead):
                read.scatter(self._read_at(read.offset, read.nbytes, room))
                continue

            into = read.into()
            for at in range(0, read.nbytes, _AT_ONCE):
                part = into[at : at + _AT_ONCE]
                part[:] = self._read_at(read.offset + at, len(part), room)

    def _chunk(self, place: tuple[int, ...]) -> StoredChunk:
        """Return the block at a place of the grid; all have room for a whole one."""
        number = 0
        for at, count in zip(place, self._counts, strict=True):
            number = number * count + at

        bounds = self._bounds(place)
        start, sizes = tuple([lo for lo, _ in bounds]), tuple([hi - lo for lo, hi in bounds])
        return StoredChunk("", number * self._room, start, sizes, self._itemsize)

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
                    self._write_at(self._chunk(place).offset, data)
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
            # Long, so that direct writes do not wait for each other, as those do that make a file longer.
            is_long = self._is_direct and allocate(self._file, 0, math.prod(self._counts) * self._room)
            if is_long and takes_direct_io(self._file):
                with suppress(OSError):  # a file system may refuse
                    self._direct = os.open(
                        f"/proc/self/fd/{self._file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
                    )
                    weakref.finalize(self, os.close, self._direct).atexit = False

    def _note(self, failure: BaseException | None) -> None:
        with self._changed:
            self._n_left -= 1
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _write_at(self, offset: int, data: memoryview) -> None:
        """Write a block: whole pages directly if they are aligned, and the rest through the page cache."""
        whole = 0
        if self._direct >= 0 and address_of(data) % PAGE == 0:
            whole = len(data) // PAGE * PAGE
            write_vectored(self._direct, offset, [data[:whole]])
        if whole < len(data):
            write_vectored(self._file, offset + whole, [data[whole:]])

    def _read_at(self, offset: int, nbytes: int, room: memoryview) -> memoryview:
        """Read a range into some of `room`, which begins on a page, and return that."""
        number, before = (self._file, 0) if self._direct < 0 else (self._direct, offset % PAGE)
        nbytes_read = nbytes if self._direct < 0 else -(-(before + nbytes) // PAGE) * PAGE
        with translated("read a temporary file in", self._directory):
            if transfer(os.preadv, number, offset - before, [room[:nbytes_read]]) < offset + nbytes:
                raise StorageError("read", self._directory, "a temporary file ends before what was written")

        return room[before : before + nbytes]
