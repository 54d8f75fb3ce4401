"""Mapping files into memory: their bytes are read on access, and shared with other processes."""

from __future__ import annotations

__all__ = ("map_file",)

import os

from penstock.handlers.stores.descriptor import Descriptor, translated
from penstock.kernel.memory.buffers import file_memory


def map_file(path: str) -> memoryview:
    """Map a whole file, read-only and shared, in the same time for any size.

    The mapping lives as long as the view or any slice of it, even if the file is renamed or removed. It keeps
    no descriptor open.

    Use it only for files that never change: if a mapped file is truncated, a process that reads past its new
    end is killed (SIGBUS).

    Returns:
        The bytes; empty for an empty file.

    Raises:
        NotAFileError: If it is a pipe, a socket or a device.
        StorageError: If it cannot be opened or mapped.
    """
    file = Descriptor.of_regular(path)
    try:
        with translated("map", path):
            nbytes = os.fstat(file.number).st_size
            return file_memory(file.number, nbytes) if nbytes else memoryview(b"")
    finally:
        file.close()
