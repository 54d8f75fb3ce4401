"""A store that counts the bytes read from data files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.handlers.stores.local import LocalStore
from penstock.kernel.protocols.stores import ReadableFile
from penstock.kernel.protocols.transfers import Transfers


class CountingStore:
    """The local store, with book kept of what is read of data files: (offset, length), in order."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._inner = LocalStore()

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.ranges)

    def open_data_file(self, path: str) -> ReadableFile:
        return _CountingFile(self._inner.open_data_file(path), self.ranges)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _CountingFile:
    def __init__(self, inner: ReadableFile, ranges: list[tuple[int, int]]) -> None:
        self._inner = inner
        self._ranges = ranges

    @property
    def transfers(self) -> Transfers:
        return self._inner.transfers

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._ranges.append((offset, sum(len(buffer) for buffer in buffers)))
        self._inner.read_at(offset, buffers)

    def close(self) -> None:
        self._inner.close()
