"""Page-aligned buffers for writes that bypass the page cache."""

from __future__ import annotations

__all__ = ("Arena",)

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.kernel.memory.buffers import anonymous_memory

HUGE_PAGE = 2**21


@final
class Arena:
    """Lends blocks of memory to writing threads. Thread-safe.

    Blocks are reused, so there are never more of them than writing threads. All are freed when the last
    user leaves.

    Args:
        block_bytes: Length of a block, a multiple of the page size. The default is one huge page, which the
            system pins for a transfer in one step; with small pages a save takes half as long again.
    """

    __slots__ = ("_free", "_lock", "_n_users", "block_bytes")

    def __init__(self, block_bytes: int = HUGE_PAGE) -> None:
        self.block_bytes = block_bytes
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lock = Lock()
        self._n_users = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes in blocks that are not lent now."""
        with self._lock:
            return len(self._free) * self.block_bytes

    def enter(self) -> None:
        """Count one more user. Blocks are kept as long as there are users."""
        with self._lock:
            self._n_users += 1

    def leave(self) -> None:
        """Count one user less. The last one to leave frees the blocks."""
        with self._lock:
            self._n_users -= 1
            if not self._n_users:
                self._free.clear()

    @contextmanager
    def block(self) -> Generator[npt.NDArray[np.uint8]]:
        """Lend a block until the end of the context. Its content is undefined."""
        with self._lock:
            block = self._free.pop() if self._free else None

        block = _allocate(self.block_bytes) if block is None else block
        try:
            yield block
        finally:
            with self._lock:
                if self._n_users:
                    self._free.append(block)


def _allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    memory = np.frombuffer(anonymous_memory(nbytes + HUGE_PAGE, huge_pages=True), np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + nbytes]
