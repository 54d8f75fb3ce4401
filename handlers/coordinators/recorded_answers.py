"""Answers that one process got from a store when it opened a checkpoint, for others that open the same.

Opening asks for thousands of lengths and reads megabytes of documents. If 10,000 processes did so at once,
a file system would see no heavier load of a job. So one process opens the checkpoint and keeps the answers,
and the others open it with these. What was not asked there, they ask the store themselves.
"""

from __future__ import annotations

__all__ = ("AnsweredStore", "RecordingStore")

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, final

import msgpack

from penstock.kernel.errors import CoordinationError, StorageError
from penstock.kernel.protocols.stores import ReadableFile, Store, StoreWrapper, Transfers

_ONE: Final = frozenset({"kind", "size", "list_directory", "list_folders", "read_file", "check_links"})
"""Calls about one path."""

_MANY: Final = frozenset({"read_files", "file_sizes", "data_sizes"})
"""Calls with many paths, and an answer for each."""

_OPEN: Final = "open_data_file"


@final
class RecordingStore(StoreWrapper):
    """A store that records its answers to reads. Everything else is passed on.

    Args:
        store: Of this process.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._answers: dict[tuple[Any, ...], Any] | None = {}

    def call(self, operation: str, *given: Any, **options: Any) -> Any:
        if operation in _ONE:
            return self._one(operation, *given)
        if operation in _MANY:
            return self._many(operation, *given)

        return super().call(operation, *given, **options)

    def encoded(self) -> bytes:
        """Return all answers, compressed, and stop recording."""
        rows = [[*key, value] for key, value in (self._answers or {}).items()]
        self._answers = None
        return zlib.compress(msgpack.packb(rows, unicode_errors="surrogatepass"), 1)

    def _keep(self, key: tuple[Any, ...], value: object) -> None:
        if self._answers is not None:
            self._answers[key] = value

    def _one(self, name: str, *asked: str) -> Any:
        try:
            found = super().call(name, *asked)
        except StorageError as error:
            told = [error.operation, error.path, error.problem, error.errno]
            self._keep((name, *asked), [False, told])
            raise

        self._keep((name, *asked), [True, list(found) if name.startswith("list") else found])
        return found

    def _many(self, name: str, paths: Iterable[str]) -> Any:
        asked = list(paths)
        found = super().call(name, asked)
        for path, each in zip(asked, found, strict=True):
            self._keep((name, path), each)

        return found

    def open_data_file(self, path: str) -> ReadableFile:
        return _RecordedFile(self.inner.open_data_file(path), partial(self._read, path))

    def _read(self, path: str, offset: int, data: bytes) -> None:
        self._keep((_OPEN, path, offset, len(data)), data)


@final
class AnsweredStore(StoreWrapper):
    """A store that answers from a recording, and asks another store for the rest.

    Args:
        store: Of this process.
        answers: Encoded by the process that opened the checkpoint.

    Raises:
        CoordinationError: If that cannot be read.
    """

    def __init__(self, store: Store, answers: bytes) -> None:
        super().__init__(store)
        try:
            rows: list[list[Any]] = msgpack.unpackb(zlib.decompress(answers), unicode_errors="surrogatepass")
            self._answers = {tuple(key): value for *key, value in rows}
        except (zlib.error, ValueError, TypeError, msgpack.UnpackException) as error:
            problem = f"what process 0 opened cannot be read ({error}): do all processes run one penstock?"
            raise CoordinationError(problem) from error

    def call(self, operation: str, *given: Any, **options: Any) -> Any:
        if operation in _ONE:
            return self._one(operation, *given)
        if operation in _MANY:
            return self._many(operation, *given)

        return super().call(operation, *given, **options)

    def forget(self) -> None:
        """Ask the store itself from here on."""
        self._answers = {}

    def _one(self, name: str, *asked: str) -> Any:
        told = self._answers.get((name, *asked))
        if told is None:
            return super().call(name, *asked)

        is_answer, found = told
        if not is_answer:
            raise StorageError(*found)

        return found

    def _many(self, name: str, paths: Iterable[str]) -> Any:
        asked = list(paths)
        if all((name, path) in self._answers for path in asked):
            return [self._answers[name, path] for path in asked]

        return super().call(name, asked)

    def open_data_file(self, path: str) -> ReadableFile:
        return _AnsweredFile(partial(self.inner.open_data_file, path), partial(self._data, path))

    def _data(self, path: str, offset: int, nbytes: int) -> bytes | None:
        found: bytes | None = self._answers.get((_OPEN, path, offset, nbytes))
        return found


@final
class _RecordedFile:
    __slots__ = ("_inner", "_keep")

    def __init__(self, inner: ReadableFile, keep: Callable[[int, bytes], None]) -> None:
        self._inner = inner
        self._keep = keep

    @property
    def transfers(self) -> Transfers:
        return self._inner.transfers

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._inner.read_at(offset, buffers)
        self._keep(offset, b"".join(buffers))

    def close(self) -> None:
        self._inner.close()


@final
class _AnsweredFile:
    """A file that is opened only for a read that was not recorded."""

    __slots__ = ("_data", "_inner", "_open")

    def __init__(self, open_: Callable[[], ReadableFile], data: Callable[[int, int], bytes | None]) -> None:
        self._open = open_
        self._data = data
        self._inner: ReadableFile | None = None

    @property
    def transfers(self) -> Transfers:
        return Transfers() if self._inner is None else self._inner.transfers

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        data = self._data(offset, sum(map(len, buffers)))
        if data is None:
            if self._inner is None:
                self._inner = self._open()

            self._inner.read_at(offset, buffers)
            return

        at = 0
        for buffer in buffers:
            buffer[:] = data[at : at + len(buffer)]
            at += len(buffer)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
