"""Remembers the files that this process has synced, so that none is synced again."""

from __future__ import annotations

__all__ = ("SyncedFiles",)

import os
from typing import Final, final

from penstock.kernel.memory.bounded_cache import BoundedCache

_MOST: Final = 1 << 16
_BYTES_OF_AN_ENTRY: Final = 300


@final
class SyncedFiles:
    """Remembers the last files that were synced, by inode, length and time of change. Thread-safe.

    A file that is written later has another time. A link to it has the same.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: BoundedCache[tuple[int, ...], bool] = BoundedCache(_MOST)

    def note(self, descriptor: int) -> None:
        """Note that an open file was just synced."""
        self._known.put(_key(os.fstat(descriptor)), True, _BYTES_OF_AN_ENTRY)

    def knows(self, descriptor: int) -> bool:
        """True if an open file was synced after its last change."""
        return self._known.get(_key(os.fstat(descriptor))) is not None


def _key(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
