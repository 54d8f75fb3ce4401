"""A store in which some documents are replaced or hidden, so that the rest of a damaged checkpoint opens."""

from __future__ import annotations

__all__ = ("PatchedStore",)

import os
from collections.abc import Iterable, Sequence
from typing import Any, final

from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.stores import Store


@final
class PatchedStore:
    """A store to read from, with other documents. It has the capabilities of the inner store.

    Args:
        inner: The store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner  #: as it is
        self._replaced: dict[str, bytes] = {}
        self._hidden: set[str] = set()

    def replace(self, path: str, data: bytes) -> None:
        """Let the file at `path` hold `data`."""
        self._replaced[path] = data

    def hide(self, path: str) -> bool:
        """Let nothing lie at `path`. Return False if that is so already."""
        known = path in self._hidden
        self._hidden.add(path)
        self._replaced.pop(path, None)
        return not known

    def kind(self, path: str) -> Any:
        return None if path in self._hidden else self.inner.kind(path)

    def list_directory(self, path: str) -> Sequence[str]:
        names = self.inner.list_directory(path)
        return [name for name in names if os.path.join(path, name) not in self._hidden]

    def read_file(self, path: str) -> bytes:
        if path in self._hidden:
            raise StorageError("read", path, "is hidden", 2)

        found = self._replaced.get(path)
        return self.inner.read_file(path) if found is None else found

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        inner: Any = self.inner
        wanted = list(paths)
        found = zip(wanted, inner.read_files(wanted), strict=True)
        return [None if path in self._hidden else self._replaced.get(path, data) for path, data in found]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
