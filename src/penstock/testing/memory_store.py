"""The smallest store: the required part, in memory. Public as `penstock.testing.MemoryStore`."""

from __future__ import annotations

__all__ = ("MemoryStore", "lockless_store")

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from threading import RLock
from typing import Final, Literal, cast, final

from penstock.handlers.stores.file_system import SystemCalls
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import SpecError, StorageError, TruncatedDataError
from penstock.kernel.protocols.stores import BuildToken, Store, Transfers

_BUILDS: Final = "/.builds"


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    number: int  #: unique to this object


@final
class MemoryStore(Store):
    """Objects under keys, as in a bucket: nothing is renamed, replaced, mapped or held.

    A save builds under its own prefix. Publishing puts one mark that maps the checkpoint's path to that
    prefix. Beyond what every store must do it has `share`, which copies, and `free_bytes`. So it shows what a
    minimal store is, and tests can see what is refused on one.

    Args:
        capacity_bytes: How much all objects together may hold; None for no limit.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        if not isinstance(cast("object", capacity_bytes), int | None):
            raise SpecError(f"capacity_bytes is a number of bytes, or None, not {capacity_bytes!r}")

        self._capacity_bytes = capacity_bytes
        self._lock = RLock()
        self._numbers = count(1)
        self._objects: dict[str, _Object] = {}
        self._directories: dict[str, int] = {"/": 0}
        self._marks: dict[str, str] = {}  # published paths, and the keys that they lead to
        self._claims: dict[str, str] = {}  # paths claimed by saves, and where those build

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        with self._lock:
            key = self._key(path)
            if key in self._objects:
                return "file"

            return "directory" if key in self._directories else None

    def size(self, path: str) -> int:
        return len(self._object("size", path).data)

    def identity(self, path: str) -> object:
        with self._lock:
            key = self._key(path)
            return self._objects[key].number if key in self._objects else self._directories.get(key)

    def list_directory(self, path: str) -> Sequence[str]:
        with self._lock:
            if self.kind(path) != "directory":
                raise _absent("list", path)

            directory = self._key(path)
            keys = [*self._objects, *self._directories]
            names = {os.path.basename(key) for key in keys if os.path.dirname(key) == directory}
            return sorted(names | {os.path.basename(at) for at in self._marks if os.path.dirname(at) == path})

    def check_writable(self, path: str) -> None:
        self._check_parents("create", path)

    def make_directory(self, path: str) -> None:
        with self._lock:
            self._check_parents("make_directory", path)
            key = self._key(path)
            if key in self._objects:
                raise StorageError("make_directory", path, "is a file", errno.EEXIST)

            while key not in self._directories:
                self._directories[key] = next(self._numbers)
                key = os.path.dirname(key)

    def sync_directory(self, path: str) -> None:
        """Do nothing: writes are visible at once."""

    def remove_tree(self, path: str) -> None:
        with self._lock:
            # The marks first: from here on no reader finds a checkpoint there.
            marked = [at for at in self._marks if _is_within(at, path)]
            prefixes = [self._key(path), *[self._marks.pop(at) for at in marked]]
            for known in (self._objects, self._directories):
                for key in [key for key in known if any(_is_within(key, prefix) for prefix in prefixes)]:
                    del known[key]

    def read_file(self, path: str) -> bytes:
        return self._object("read", path).data

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        with self._lock:
            self._check_parents("write", path)
            there = self._objects.get(self._key(path))
            if create and there is not None:
                if there.data != data:
                    raise StorageError("write", path, "exists with another content", errno.EEXIST)
                return False

            replaced = 0 if there is None else len(there.data)
            free = self.free_bytes(path)
            if free is not None and len(data) > free + replaced:
                raise StorageError("write", path, "the store is full", errno.ENOSPC)

            self._objects[self._key(path)] = _Object(bytes(data), next(self._numbers))
            return True

    def free_bytes(self, path: str) -> int | None:
        """Return the free bytes of the capacity; None if there is no limit."""
        with self._lock:
            if self._capacity_bytes is None:
                return None

            return self._capacity_bytes - sum([len(found.data) for found in self._objects.values()])

    def create_data_file(self, path: str) -> _MemoryDataFile:
        with self._lock:
            self._check_parents("create", path)
            if self.kind(path) is not None:
                raise StorageError("create", path, "exists", errno.EEXIST)

            self.write_file(path, b"")
            return _MemoryDataFile(self, path)

    def open_data_file(self, path: str) -> _MemoryReadableFile:
        return _MemoryReadableFile(path, self._object("open", path).data)

    def share(self, source: str, destination: str) -> Literal["copy"]:
        """Copy the object, as a bucket does by itself: no byte passes through this machine."""
        with self._lock:
            if self.kind(destination) is not None:
                raise StorageError("share", destination, "exists", errno.EEXIST)

            self.write_file(destination, self._object("share", source).data)
            return "copy"

    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        with self._lock:
            if final in self._claims:
                raise StorageError("build", final, "another save is building there", errno.EBUSY)

            place = self._claims[final] = f"{_BUILDS}/{next(self._numbers)}"
            return BuildToken(final, place, file)

    def publish(self, token: BuildToken) -> None:
        with self._lock:
            if self.kind(token.final) is not None:
                raise StorageError("publish", token.final, "exists", errno.EEXIST)

            self._marks[token.final] = token.built
            del self._claims[token.final]

    def discard(self, token: BuildToken) -> None:
        with self._lock:
            if self._claims.get(token.final) == token.place:
                del self._claims[token.final]
                self.remove_tree(token.place)

    def _key(self, path: str) -> str:
        """Follow the mark of the path or of a parent."""
        for above in _from(path):
            if above in self._marks:
                return self._marks[above] + path[len(above) :]

        return path

    def _object(self, operation: str, path: str) -> _Object:
        with self._lock:
            found = self._objects.get(self._key(path))
            if found is None:
                raise _absent(operation, path)

            return found

    def _check_parents(self, operation: str, path: str) -> None:
        with self._lock:
            for above in _from(os.path.dirname(path)):
                if self._key(above) in self._objects:
                    raise StorageError(operation, path, f"{above!r} is a file", errno.ENOTDIR)


@final
class _MemoryDataFile:
    """A new object. It has its content from `sync` on, as one that is put in one request."""

    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store, self._path = store, path
        self._lock = RLock()
        self._data = bytearray()
        self.transfers = Transfers()

    def allocate(self, nbytes: int) -> None:
        """Do nothing: there is no room to reserve."""

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._lock:
            data = b"".join(buffers)
            self._data.extend(bytes(max(0, offset - len(self._data))))
            self._data[offset : offset + len(data)] = data
            self.transfers += Transfers(buffered_bytes=len(data))

    def sync(self) -> None:
        with self._lock:
            self._store.write_file(self._path, bytes(self._data))

    def close(self) -> None:
        """Do nothing: what was not synced is lost."""


@final
class _MemoryReadableFile:
    def __init__(self, path: str, data: bytes) -> None:
        self._path, self._data = path, data
        self._lock = RLock()
        self.transfers = Transfers()

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        needed = offset + sum([buffer.nbytes for buffer in buffers])
        if needed > len(self._data):
            raise TruncatedDataError(self._path, needed, len(self._data))

        for buffer in buffers:
            buffer.cast("B")[:] = self._data[offset : offset + buffer.nbytes]
            with self._lock:
                self.transfers += Transfers(buffered_bytes=buffer.nbytes)

            offset += buffer.nbytes

    def close(self) -> None:
        """Do nothing."""


def _from(path: str) -> Iterator[str]:
    """Yield a path and what is above it, below the root: of a URL, too."""
    while path not in {"", "/"}:
        yield path
        path = os.path.dirname(path)


def _is_within(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}/")


def _absent(operation: str, path: str) -> StorageError:
    return StorageError(operation, path, "nothing of that kind is there", errno.ENOENT)


def lockless_store(error: int = errno.ENOLCK) -> LocalStore:
    """Return a store as on a network file system that has no `flock`: files with claims take its place.

    Args:
        error: What the system says: ENOLCK, ENOSYS, ENOTSUP or EOPNOTSUPP.
    """

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    return LocalStore(calls=SystemCalls(flock=refuse))
