"""A store in which some documents are replaced or hidden, so that the rest of a damaged checkpoint opens."""

from __future__ import annotations

__all__ = (
    "PatchedStore",
    "patch_documents",
)

import errno
import os
from collections.abc import Iterable, Sequence
from typing import Final, Literal, final

from penstock.handlers.formats import integrity
from penstock.handlers.formats.integrity import Digest, digest_of
from penstock.handlers.formats.orbax.checkpoint_documents import SealedDocuments
from penstock.handlers.formats.orbax.file_names import (
    ARRAY_METADATAS,
    CHECKPOINT_METADATA,
    COMMIT_MARK,
    COMMIT_MARK_TEXT,
    INTEGRITY,
    SHARDING,
    STRINGS,
)
from penstock.kernel.errors import CorruptCheckpointError, PenstockError, StorageError, TruncatedDataError
from penstock.kernel.protocols.stores import ReadableFile, Store, StoreWrapper, Transfers
from penstock.tools.repair_report import RepairedLeaf


@final
class PatchedStore(StoreWrapper):
    """A store to read from, with other documents.

    Args:
        inner: The store.
    """

    # Only what every store can do is patched, so it can do no more.

    @property
    def directories(self) -> None:
        return None

    @property
    def shared_files(self) -> None:
        return None

    @property
    def system_files(self) -> None:
        return None

    @property
    def objects(self) -> None:
        return None

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._replaced: dict[str, bytes] = {}
        self._hidden: dict[str, str] = {}

    def replace(self, path: str, data: bytes) -> None:
        """Let the file at `path` hold `data`, whether it is there or not."""
        self._hidden.pop(path, None)
        self._replaced[path] = data

    def hide(self, path: str, problem: str) -> bool:
        """Let there be nothing at `path`, because of a problem. Return False if that is so already."""
        known = path in self._hidden
        self._hidden.setdefault(path, problem)
        self._replaced.pop(path, None)
        return not known

    def problem_of(self, path: str) -> str:
        """Return why the file at `path` is hidden; empty if it is not."""
        return self._hidden.get(path, "")

    def problem_below(self, directory: str) -> str:
        """Return what is wrong with the first hidden file in a directory; empty if none is hidden."""
        inside = [path for path in self._hidden if path.startswith(os.path.join(directory, ""))]
        return f"{os.path.basename(inside[0])} {self._hidden[inside[0]]}" if inside else ""

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        if path in self._replaced:
            return "file"

        return None if path in self._hidden else self.inner.kind(path)

    def size(self, path: str) -> int:
        data = self._replaced.get(path)
        return self.inner.size(path) if data is None else len(data)

    def list_directory(self, path: str) -> Sequence[str]:
        names = [
            name for name in self.inner.list_directory(path) if os.path.join(path, name) not in self._hidden
        ]
        added = {os.path.basename(file) for file in self._replaced if os.path.dirname(file) == path}
        return sorted(added.union(names))

    list_folders = Store.list_folders  # of the names that are shown

    def read_file(self, path: str) -> bytes:
        self._check(path)
        found = self._replaced.get(path)
        return self._unsealed(path, self.inner.read_file(path)) if found is None else found

    def open_data_file(self, path: str) -> ReadableFile:
        self._check(path)
        data = self._replaced.get(path)
        return self.inner.open_data_file(path) if data is None else _Replaced(path, data)

    def _check(self, path: str) -> None:
        if path in self._hidden:
            raise StorageError("read", path, "is hidden", errno.ENOENT)

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
        wanted = list(paths)
        found = zip(wanted, self.inner.read_files(wanted), strict=True)
        return [None if path in self._hidden else self._replaced.get(path, data) for path, data in found]

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        wanted = list(paths)
        found = zip(wanted, self.inner.file_sizes(wanted), strict=True)
        sizes = {path: len(data) for path, data in self._replaced.items()}
        return [None if path in self._hidden else sizes.get(path, size) for path, size in found]


@final
class _Replaced:
    """A file that is only in memory."""

    def __init__(self, path: str, data: bytes) -> None:
        self._path = path
        self._data = memoryview(data)
        self.transfers = Transfers()

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        end = offset + sum(map(len, buffers))
        if end > len(self._data):
            raise TruncatedDataError(self._path, end, len(self._data))

        for buffer in buffers:
            buffer[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)

    def close(self) -> None:
        pass


_NOTED: Final = frozenset({CHECKPOINT_METADATA, INTEGRITY, SHARDING, STRINGS})
"""Documents whose loss is noted by itself. That of others shows in the leaves or the item that it takes."""


def patch_documents(
    patched: PatchedStore, path: str, directory: str, others: Sequence[str], lost: list[RepairedLeaf]
) -> None:
    """Compare the documents of a directory with their record, and patch those that differ. Blocking.

    Args:
        patched: Shows the checkpoint.
        path: Of the checkpoint.
        directory: That has a record: the checkpoint, or an item of it.
        others: Paths of other checkpoints.
        lost: What is lost is added.
    """
    store, item = patched.inner, os.path.relpath(directory, path)
    place = "" if item == "." else item
    try:
        documents = SealedDocuments.open(store, directory, store.list_directory(directory))
        problems = list(documents.problems())
    except CorruptCheckpointError as error:
        patched.hide(os.path.join(directory, INTEGRITY), error.problem)
        lost.append(RepairedLeaf("gone", "", place, f"checksums: {error.problem}"))
        return
    except StorageError:
        return  # found again where it is read

    for problem in problems:
        name = os.path.relpath(problem.path, directory)
        expected = documents.recorded.documents.get(name)
        found = None if expected is None else _intact_copy(store, path, problem.path, others, expected)
        if found is not None:
            patched.replace(problem.path, found[1])
            text = f"{name}: {problem.problem}"
            lost.append(RepairedLeaf("taken", "", place, text, found[0]))
            continue

        patched.hide(problem.path, problem.problem)
        if os.path.basename(name) in _NOTED or name.startswith(f"{ARRAY_METADATAS}/"):
            lost.append(RepairedLeaf("gone", "", place, f"{name}: {problem.problem}"))


def _intact_copy(
    store: Store, path: str, file: str, others: Sequence[str], expected: Digest
) -> tuple[str, bytes] | None:
    """Return the same document of another checkpoint, and that one's path."""
    for other in others:
        try:
            data = store.read_file(os.path.join(other, os.path.relpath(file, path)))
        except PenstockError:
            continue
        if digest_of(data) == expected:
            return other, data

    return None
