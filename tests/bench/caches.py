"""The page cache: filled and dropped on purpose, so that warm is warm and cold is cold."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SETTLE_S = 0.05
STILL_COLD = 0.02  # of the pages: a header that something read again does not make a file warm
_LIBC = ctypes.CDLL(None, use_errno=True)


def settle() -> None:
    """Before every timed operation: no garbage, no free memory kept, no dirty pages, a moment of quiet.

    What the C library keeps of freed memory would spare the next operation its page faults, which a
    process that restores once cannot be spared.
    """
    gc.collect()
    if hasattr(_LIBC, "malloc_trim"):  # glibc's
        _LIBC.malloc_trim(0)

    os.sync()
    time.sleep(SETTLE_S)


def files_of(path: Path) -> Iterator[Path]:
    """Every file of a checkpoint, be it a folder or a file."""
    if path.is_file():
        yield path
    else:
        yield from (found for found in sorted(path.rglob("*")) if found.is_file())


def warm(path: Path) -> None:
    """Read every file once."""
    buffer = bytearray(8 * 2**20)
    for name in files_of(path):
        with open(name, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(path: Path) -> bool:
    """Have the kernel forget every page of the files; say whether it did."""
    forget(path)
    return resident(path) <= STILL_COLD


def forget(path: Path) -> None:
    """Ask the kernel to forget every page of the files that is not dirty."""
    for name in files_of(path):
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(path: Path) -> float:
    """Which part of the pages of a checkpoint is in the page cache, 0 to 1."""
    counts = [_resident_pages(name) for name in files_of(path) if name.stat().st_size]
    return sum(cached for cached, _ in counts) / max(1, sum(pages for _, pages in counts))


def _resident_pages(path: Path) -> tuple[int, int]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        try:
            n_pages = -(-len(mapped) // mmap.PAGESIZE)
            pages = np.zeros(n_pages, np.uint8)
            arguments = (ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped)))
            if _LIBC.mincore(*arguments, ctypes.c_void_p(pages.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
        finally:
            del view  # a mapping with a view on it cannot be closed

        return int((pages & 1).sum()), n_pages
