"""A store in which some documents are replaced or hidden, so that the rest of a damaged checkpoint opens."""

from __future__ import annotations

__all__ = ("PatchedStore",)

import os
from collections.abc import Iterable, Sequence
from typing import Any, final

from penstock.handlers.formats.common import integrity
from penstock.handlers.formats.orbax.documents.file_names import COMMIT_MARK, COMMIT_MARK_TEXT, INTEGRITY
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
        self._hidden: dict[str, str] = {}

    def replace(self, path: str, data: bytes) -> None:
        """Let the file at `path` hold `data`."""
        self._replaced[path] = data

    def hide(self, path: str, problem: str) -> bool:
        """Let nothing lie at `path`, because of a problem. Return False if that is so already."""
        known = path in self._hidden
        self._hidden.setdefault(path, problem)
        self._replaced.pop(path, None)
        return not known

    def problem_below(self, directory: str) -> str:
        """Return what is wrong with the first hidden file in a directory; empty if none is hidden."""
        inside = [path for path in self._hidden if path.startswith(os.path.join(directory, ""))]
        return f"{os.path.basename(inside[0])} {self._hidden[inside[0]]}" if inside else ""

    def kind(self, path: str) -> Any:
        return None if path in self._hidden else self.inner.kind(path)

    def list_directory(self, path: str) -> Sequence[str]:
        names = self.inner.list_directory(path)
        return [name for name in names if os.path.join(path, name) not in self._hidden]

    def read_file(self, path: str) -> bytes:
        if path in self._hidden:
            raise StorageError("read", path, "is hidden", 2)

        found = self._replaced.get(path)
        return self._unsealed(path, self.inner.read_file(path)) if found is None else found

    def _unsealed(self, path: str, data: bytes) -> bytes:
        """Return a record without the digests of what was changed, and a mark without that of the record."""
        directory, name = os.path.split(path)
        changed = self._hidden.keys() | self._replaced.keys()
        if not changed or name not in (COMMIT_MARK, INTEGRITY):
            return data
        if name == COMMIT_MARK:
            return COMMIT_MARK_TEXT

        def is_changed(document: str) -> bool:
            return os.path.basename(document) == INTEGRITY or os.path.join(directory, document) in changed

        return integrity.without_documents(path, data, is_changed)

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        inner: Any = self.inner
        wanted = list(paths)
        found = zip(wanted, inner.read_files(wanted), strict=True)
        return [None if path in self._hidden else self._replaced.get(path, data) for path, data in found]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
