"""Mapping files into memory: their bytes are read on access, and shared with other processes."""

from __future__ import annotations

__all__ = ("map_file",)

import mmap
import os
import sys

from penstock.handlers.stores.descriptor import Descriptor, translated


def map_file(path: str) -> memoryview:
    """Map a whole file, read-only and shared, in the same time for any size.

    The mapping lives as long as the view or any slice of it, even if the file is renamed or removed.
    Before Python 3.13 it keeps a descriptor open.

    Use it only for files that never change: if a mapped file is truncated, a process that reads past its new
    end is killed (SIGBUS).

    Returns:
        The bytes; empty for an empty file.

    Raises:
        StorageError: If it cannot be opened or mapped.
    """
    file = Descriptor(path, os.O_RDONLY)
    try:
        with translated("map", path):
            nbytes = os.fstat(file.number).st_size
            if not nbytes:
                return memoryview(b"")

            return memoryview(_map(file.number, nbytes))
    finally:
        file.close()


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)

    return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
