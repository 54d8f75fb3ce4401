"""`pwritev` and `preadv` for any number of buffers, repeated until all bytes are transferred."""

from __future__ import annotations

__all__ = ("read_vectored", "write_vectored")

import os
from collections import deque
from collections.abc import Callable, Sequence
from errno import EIO
from itertools import islice

MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))  #: buffers per call; 1024 on Linux


def write_vectored(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Write all buffers one after another, beginning at `offset`.

    Raises:
        OSError: As `os.pwritev` does. Any number of bytes may have been written before.
    """
    end = offset + sum(buffer.nbytes for buffer in buffers)
    if _transfer(os.pwritev, descriptor, offset, buffers) < end:
        raise OSError(EIO, "the system wrote nothing and reported no error")


def read_vectored(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill the buffers one after another, beginning at `offset`.

    Returns:
        The offset reached: the end of the last buffer's range, or less if the file ends before.

    Raises:
        OSError: As `os.preadv` does. Any number of bytes may have been read before.
    """
    return _transfer(os.preadv, descriptor, offset, buffers)


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    offset: int,
    buffers: Sequence[memoryview],
) -> int:
    # A Linux call transfers at most 2 GiB - 4 KiB, and any call may transfer less than it was asked to.
    pending = deque(buffer.cast("B") for buffer in buffers if buffer.nbytes)
    while pending:
        moved = call(descriptor, list(islice(pending, MAX_BUFFERS)), offset)
        if moved == 0:
            break

        offset += moved
        while pending and moved >= pending[0].nbytes:
            moved -= pending.popleft().nbytes
        if moved:
            pending[0] = pending[0][moved:]

    return offset
