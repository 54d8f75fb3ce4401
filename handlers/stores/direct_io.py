"""Which bytes of a request may go past the page cache. Everything but `open_direct` is pure."""

from __future__ import annotations

__all__ = (
    "DIRECT_FROM",
    "PAGE",
    "Io",
    "Part",
    "address_of",
    "cut",
    "open_direct",
    "parts_of",
)

import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from penstock.handlers.stores.descriptor import Descriptor
from penstock.handlers.stores.linux_calls import takes_direct_io
from penstock.kernel.errors import StorageError

Io: TypeAlias = Literal["auto", "direct", "buffered"]

PAGE = max(4096, mmap.PAGESIZE)  #: of the page cache; what every disk can transfer by itself, too
DIRECT_FROM = 2**20  #: bytes; below, the latency of the disk costs more than the page cache


class Part(NamedTuple):
    """A part of a request, and the way its bytes take."""

    nbytes: int
    direct: bool


def parts_of(offset: int, nbytes: int, block_bytes: int) -> list[Part]:
    """Cut a request, in order, into parts that may go past the page cache and parts that must not.

    Only whole pages inside the request may. A page at its edge may also hold bytes of another request,
    which are written through the page cache.

    Args:
        offset: In the file, bytes.
        nbytes: Length of the request.
        block_bytes: Most bytes of a direct part.
    """
    head = -offset % PAGE
    whole = (nbytes - head) // PAGE * PAGE
    if whole < DIRECT_FROM:
        return [Part(nbytes, direct=False)] if nbytes else []

    tail = nbytes - head - whole
    direct = [Part(min(block_bytes, whole - at), direct=True) for at in range(0, whole, block_bytes)]
    return [*_buffered(head), *direct, *_buffered(tail)]


def cut(views: Sequence[memoryview], sizes: Iterable[int]) -> Iterator[list[memoryview]]:
    """Yield the views, byte by byte in order, in runs of these sizes.

    Args:
        views: One-dimensional, of bytes.
        sizes: Together as many bytes as the views have.
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
    """Return the address of the first byte of a view that is not empty."""
    return np.frombuffer(view, np.uint8).ctypes.data


def open_direct(descriptor: Descriptor, flags: int, io: Io) -> Descriptor | None:
    """Open the file of a descriptor a second time, for transfers past the page cache.

    Returns:
        None where that is not wanted or not possible. "auto" wants it on the disk file systems that
        are known to gain by it.
    """
    if sys.platform != "linux" or io == "buffered":
        return None
    if io == "auto" and not takes_direct_io(descriptor.number):
        return None
    try:
        direct = Descriptor(descriptor.path, flags | os.O_DIRECT)
    except StorageError:  # EINVAL of a file system without it; the other descriptor serves all the same
        return None

    if os.path.samestat(os.fstat(direct.number), os.fstat(descriptor.number)):
        return direct

    direct.close()
    return None


def _buffered(nbytes: int) -> list[Part]:
    return [Part(nbytes, direct=False)] if nbytes else []
