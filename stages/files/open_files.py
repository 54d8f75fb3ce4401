"""The files of a checkpoint that is being read, of which only the last few are open."""

from __future__ import annotations

__all__ = ("OpenFiles",)

import resource
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Final, final

from penstock.kernel.protocols.stores import ReadableFile, Store

SHARE: Final = 16
"""One restore keeps 1/SHARE of the files open that its process may: each may take two descriptors, and other
restores and saves run beside it."""

MOST: Final = 256


@dataclass(slots=True)
class _Open:
    file: ReadableFile
    users: int = 0


@final
class OpenFiles:
    """Opens files when they are read. A checkpoint may have more of them than a process may open.

    Beyond `most`, the file is closed that nobody has used for the longest time. Thread-safe; blocking.

    Args:
        store: Where the files are.
        most: How many stay open; by default a part of what the process may open.
    """

    __slots__ = ("_all", "_is_over", "_lock", "_most", "_open", "_store")

    def __init__(self, store: Store, most: int | None = None) -> None:
        self._store = store
        self._most = _most() if most is None else most
        self._lock = Lock()
        self._is_over = False
        self._open: dict[str, _Open] = {}  # the one used last is last
        self._all: list[ReadableFile] = []

    @contextmanager
    def lent(self, path: str) -> Generator[ReadableFile]:
        """Lend the file at `path` for the time of the block, in which it stays open.

        Raises:
            StorageError: If it cannot be opened, or another one cannot be closed.
        """
        with self._lock:
            entry = self._open.pop(path, None)
            if entry is None:
                self._make_room()
                entry = _Open(self._store.open_data_file(path))
                self._all.append(entry.file)
                if self._is_over:
                    entry.file.close()

            entry.users += 1
            self._open[path] = entry
        try:
            yield entry.file
        finally:
            with self._lock:
                entry.users -= 1

    def files(self) -> Sequence[ReadableFile]:
        """Every file that was opened, closed ones included."""
        return list(self._all)

    def end(self) -> Sequence[ReadableFile]:
        """Keep no more files open, not even those that a thread opens which was left behind; return all."""
        self._is_over = True  # without the lock: such a thread may hold it
        return self.files()

    def _make_room(self) -> None:
        idle = [path for path, entry in self._open.items() if not entry.users]
        for path in idle[: max(0, len(self._open) - self._most + 1)]:
            self._open.pop(path).file.close()


def _most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(2, min(MOST, soft // SHARE))
