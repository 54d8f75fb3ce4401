"""An existing file of the local file system, read at chosen offsets."""

from __future__ import annotations

__all__ = ("LocalReadableFile",)

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import groupby
from threading import Lock
from typing import final

from penstock.handlers.stores.descriptor import Descriptor, translated
from penstock.handlers.stores.direct import DIRECT_FROM, Io, address_of, next_read, open_direct
from penstock.handlers.stores.vectored import read_vectored
from penstock.kernel.errors import TruncatedDataError
from penstock.kernel.transfers import Transfers

SEEN = 2**20  #: bytes that are shown at once, so that they are still in the caches of a CPU

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


@final
class LocalReadableFile:
    """An existing file, read at chosen offsets by several threads at once.

    Of a large request, what lies in the page cache is copied from there; the rest is read directly
    into its place where file system and alignment allow, and else through the page cache.

    Args:
        path: Of the file.
        io: "auto" as above; "direct" does not look into the page cache, "buffered" reads through it.
    """

    __slots__ = ("_descriptor", "_direct", "_io", "_lock", "_refused", "_transfers", "path")

    def __init__(self, path: str, io: Io) -> None:
        self._descriptor = Descriptor(path, os.O_RDONLY)
        self._direct: Descriptor | None = None
        self._io: Io = io
        self._refused = io == "buffered"
        self._lock = Lock()
        self._transfers = Transfers()
        self.path = path

    @property
    def transfers(self) -> Transfers:
        """What was read so far."""
        return self._transfers

    def read_at(
        self,
        offset: int,
        buffers: Sequence[memoryview],
        seen: Callable[[memoryview], object] | None = None,
    ) -> None:
        """Fill all buffers, beginning at `offset`.

        Args:
            offset: Bytes from the beginning of the file.
            buffers: Writable and contiguous, of any item type, in any number.
            seen: Called with each part of a buffer once it is filled, in order, while its bytes
                are still in the caches of the CPU where that is possible.

        Raises:
            TruncatedDataError: If the file ends before the buffers are full.
            StorageError: If the medium refuses.
        """
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        needed = offset + sum(map(len, views))
        at = offset
        with translated("read", self.path):
            for is_large, run in groupby(views, lambda view: len(view) >= DIRECT_FROM):
                for group in [[view] for view in run] if is_large else [list(run)]:
                    end = at + sum(map(len, group))
                    at = self._read_large(at, group[0], seen) if is_large else self._read(at, group, seen)
                    if at < end:
                        found = os.fstat(self._descriptor.number).st_size
                        raise TruncatedDataError(self.path, needed, found)

    def close(self) -> None:
        """Idempotent."""
        with ExitStack() as stack:
            stack.callback(self._descriptor.close)
            if self._direct is not None:
                stack.callback(self._direct.close)

    def _read(
        self, offset: int, views: Sequence[memoryview], seen: Callable[[memoryview], object] | None
    ) -> int:
        """Read through the page cache; return the offset reached."""
        reached = read_vectored(self._descriptor.number, offset, views)
        self._count(buffered_bytes=reached - offset)
        if seen is not None and reached == offset + sum(map(len, views)):
            for view in views:
                seen(view)

        return reached

    def _read_large(self, offset: int, view: memoryview, seen: Callable[[memoryview], object] | None) -> int:
        """Read by whatever way suits each part; return the offset reached."""
        done = 0
        while done < len(view):
            left = view[done:]
            shown = left if seen is None else left[:SEEN]
            moved = self._read_cached(offset + done, shown) or self._read_uncached(offset + done, left, shown)
            if not moved:
                break
            if seen is not None:
                seen(left[:moved])

            done += moved

        return offset + done

    def _read_cached(self, offset: int, view: memoryview) -> int:
        """Copy what the page cache holds, up to the first page that it lacks; return the bytes read."""
        if self._refused or self._io == "direct":
            return 0
        try:
            moved = os.preadv(self._descriptor.number, [view], offset, _NOWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # this file system does not say
            self._refused = True
            return 0

        self._count(buffered_bytes=moved)
        return moved

    def _read_uncached(self, offset: int, view: memoryview, shown: memoryview) -> int:
        """Read some of a view, `shown` if it goes through the page cache; return the bytes read."""
        if not self._refused:
            part = next_read(offset, address_of(view), len(view))
            if part.direct:
                moved = self._read_direct(offset, view[: part.nbytes])
                if moved is not None:
                    return moved
            else:
                shown = shown[: part.nbytes]

        moved = os.preadv(self._descriptor.number, [shown], offset)
        self._count(buffered_bytes=moved)
        return moved

    def _read_direct(self, offset: int, view: memoryview) -> int | None:
        """Read past the page cache; None if that cannot be done with this file."""
        try:
            descriptor = self._opened_directly()
            if descriptor is None:
                return None

            moved = os.preadv(descriptor.number, [view], offset)
        except OSError:  # whatever is wrong, a read through the page cache will tell, or do
            self._refused = True
            return None

        self._count(direct_bytes=moved)
        return moved

    def _opened_directly(self) -> Descriptor | None:
        # Not before it is needed: a checkpoint has many files, and a process few descriptors.
        with self._lock:
            if self._direct is None and not self._refused:
                self._direct = open_direct(self._descriptor, os.O_RDONLY, self._io)
                self._refused = self._direct is None

            return None if self._refused else self._direct

    def _count(self, direct_bytes: int = 0, buffered_bytes: int = 0) -> None:
        with self._lock:
            self._transfers += Transfers(direct_bytes, buffered_bytes)
