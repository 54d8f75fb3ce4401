"""Memory, content and limits for tests of large transfers."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import get_args

import numpy as np

from penstock.handlers.stores import data_file
from penstock.handlers.stores.data_file import PAGE, Io

MIB = 2**20
SHARED_MEMORY = Path("/dev/shm")
IOS: tuple[Io, ...] = get_args(Io)


def takes_direct_io(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return data_file.takes_direct_io(descriptor)
    finally:
        os.close(descriptor)


def content(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def aligned(nbytes: int, shift: int = 0) -> memoryview:
    """Writable memory whose address is `shift` behind that of a page."""
    whole = np.zeros(nbytes + 2 * PAGE, np.uint8)
    start = -whole.ctypes.data % PAGE + shift
    return whole[start : start + nbytes].data
