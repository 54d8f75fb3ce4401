"""A store that counts the bytes read from data files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgpack

from penstock.handlers import LocalStore
from penstock.kernel import ReadableFile, StoreWrapper, Transfers


def files_of_arrays(checkpoint: Path) -> set[str]:
    """The data files that hold array bytes, as the checkpoint itself says; others hold its index."""
    recorded = msgpack.unpackb((checkpoint / "_PENSTOCK_INTEGRITY").read_bytes())
    return {str(checkpoint / name) for name in recorded["files"]}


OCDBT_NODE = b"\x0c\xdb"  #: what a node of the index begins with, which is read from data files, too


class CountingStore(StoreWrapper):
    """The local store, with book kept of what is read of data files: (offset, length), in order."""

    def __init__(self) -> None:
        super().__init__(LocalStore())
        self.ranges: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.ranges)

    def open_data_file(self, path: str) -> ReadableFile:
        return _CountingFile(self.inner.open_data_file(path), self.ranges)


class _CountingFile:
    def __init__(self, inner: ReadableFile, ranges: list[tuple[int, int]]) -> None:
        self._inner = inner
        self._ranges = ranges

    @property
    def transfers(self) -> Transfers:
        return self._inner.transfers

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._inner.read_at(offset, buffers)
        if bytes(buffers[0][:2]) != OCDBT_NODE:
            self._ranges.append((offset, sum(len(buffer) for buffer in buffers)))

    def close(self) -> None:
        self._inner.close()
