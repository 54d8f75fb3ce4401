"""Any fsspec file system as a store of checkpoints: objects under its keys, with methods that block."""

from __future__ import annotations

__all__ = (
    "FsspecObjects",
    "fsspec_store",
)

import errno
import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Final, TypeVar, final

from penstock.handlers.stores.buckets.bucket_store import FILE_BYTES, BucketStore
from penstock.handlers.stores.buckets.objects import (
    Created,
    ListedObject,
    Listing,
    ObjectContent,
    Stat,
    same_content,
)
from penstock.kernel.errors import AccessDeniedError, SpecError, StorageError, UnreachableError
from penstock.kernel.protocols.stores import RequestFigures

T = TypeVar("T")

# fsspec has no conditional writes, so those who create a key in this process take turns.
_LOCKS: Final = 64
_TRIES: Final = 4
"""Another thread may remove an empty directory just before something is written into it."""

_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})


@final
class FsspecObjects:
    """Files of an fsspec file system below one directory, as the objects of a bucket.

    fsspec has no conditional requests: a file is looked at before it is created or swapped. Threads of one
    object of this class exclude each other; other processes are not seen in between.

    Args:
        fs: The `fsspec.AbstractFileSystem`.
        root: The directory in it, or the prefix.
    """

    __slots__ = ("_fs", "_locks", "_root", "uses_conditions")

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = str(fs._strip_protocol(root)).rstrip("/")
        self._locks = [Lock() for _ in range(_LOCKS)]
        self.uses_conditions = False

    def path(self, key: str) -> str:
        """Return the path by which a checkpointer knows a key."""
        return f"/{key}"

    def head(self, key: str) -> Stat | None:
        info = self._info(key)
        if info is None or info.get("type") == "directory":
            return None

        return Stat(int(info["size"]), _tag(info), self._modified(key, info))

    def figures(self) -> RequestFigures:
        """Return no counts: the file system does not tell its requests."""
        return RequestFigures()

    def read(self, key: str) -> ObjectContent | None:
        found = self.head(key)
        if found is None:
            return None
        try:
            return ObjectContent(bytes(self._call("get", key, self._fs.cat_file, self._at(key))), found.tag)
        except StorageError as error:
            if error.errno in _ABSENT:
                return None

            raise

    def read_range(self, key: str, start: int, nbytes: int) -> memoryview:
        cat = self._fs.cat_file
        return memoryview(self._call("get", key, lambda at: cat(at, start, start + nbytes), self._at(key)))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._into("put", key, lambda at: self._fs.pipe_file(at, bytes(data)))

    def create(self, key: str, data: bytes | memoryview) -> Created:
        with self._lock_of(key):
            if self.head(key) is None:
                try:
                    self._into("create", key, lambda at: self._fs.pipe_file(at, bytes(data), mode="create"))
                except StorageError as error:
                    if error.errno != errno.EEXIST:
                        raise
                else:
                    return "created"

            there = self.read(key)
            if there is None:
                raise StorageError("create", self.path(key), "is no file", errno.EEXIST)

            return "same" if there[0] == data else "other"

    def swap(self, key: str, data: bytes, tag: str, within_s: float | None = None) -> str | None:
        with self._lock_of(key):
            there = self.head(key)
            if there is None or there.tag != tag:
                return None

            self.put(key, data)
            written = self.head(key)
            return written and written.tag

    def put_parts(self, key: str, parts: Iterator[memoryview]) -> None:
        """Write a file of any length. If that fails, what was written of it is removed."""
        try:
            self._into("put", key, lambda at: self._write_parts(at, parts))
        except BaseException:
            with suppress(StorageError):
                self.delete([key])

            raise

    def _write_parts(self, at: str, parts: Iterator[memoryview]) -> None:
        with self._fs.open(at, "wb") as file:
            for part in parts:
                file.write(part)

    @property
    def most_copied(self) -> int | None:
        """Not known."""
        return None

    def copy_if_absent(self, source: str, destination: str) -> Created:
        with self._lock_of(destination):
            if self.head(destination) is None:
                self.copy(source, destination)
                return "created"

        return "same" if same_content(self, source, destination) else "other"

    def copy(self, source: str, destination: str) -> None:
        self._into("copy", destination, lambda at: self._fs.cp_file(self._at(source), at))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete files, and the directories that are empty then."""
        for key in keys:
            try:
                self._call("delete", key, self._fs.rm_file, self._at(key))
            except StorageError as error:
                if error.errno not in _ABSENT:
                    raise

        for directory in sorted({above for key in keys for above in _above(key)}, reverse=True):
            at = self._at(directory)
            if at.strip("/").count("/"):  # the outermost is perhaps a bucket, which is not ours to remove
                with suppress(Exception):  # it is not empty, or this file system has no directories
                    self._fs.rmdir(at)

    def list(self, prefix: str) -> Listing:
        entries = self._entries(prefix)
        folders = [name for name, is_folder in entries if is_folder]
        return Listing(folders, [name for name, is_folder in entries if not is_folder])

    def walk(self, prefix: str) -> Iterator[str]:
        at = self._at(prefix)
        self._fs.invalidate_cache()
        try:
            found: Sequence[str] = self._call("list", prefix, self._fs.find, at)
        except StorageError as error:
            if error.errno in _ABSENT:
                return

            raise

        yield from [name[len(self._root) + 1 :] for name in map(str, found) if name.startswith(f"{at}/")]

    def entries(self, prefix: str) -> Iterator[Sequence[ListedObject]]:
        """Yield nothing: `find` of many file systems asks for each directory."""
        yield from ()

    def has_below(self, prefix: str) -> bool:
        at = f"{prefix}/" if prefix else ""
        entries = sorted(self._entries(prefix), key=lambda entry: entry[1])  # files first
        return any(not is_folder or self.has_below(at + name) for name, is_folder in entries)

    def keeps_conditions(self, key: str, data: bytes) -> bool:
        """Say no: fsspec has no words for them."""
        return False

    def _entries(self, prefix: str) -> Sequence[tuple[str, bool]]:
        at = self._at(prefix)
        self._fs.invalidate_cache()  # others write, too
        try:
            found: list[dict[str, Any]] = self._call(
                "list", prefix, lambda at: self._fs.ls(at, detail=True), at
            )
        except StorageError as error:
            if error.errno in _ABSENT:
                return []

            raise

        named = [(str(each["name"]).rstrip("/"), each["type"] == "directory") for each in found]
        return [(name[len(at) + 1 :], is_folder) for name, is_folder in named if name.startswith(f"{at}/")]

    def _listed(self, at: str) -> Sequence[dict[str, Any]]:
        return [*self._fs.ls(at, detail=True)]

    def _info(self, key: str) -> dict[str, Any] | None:
        self._fs.invalidate_cache()
        try:
            info: dict[str, Any] = self._call("head", key, self._fs.info, self._at(key))
        except StorageError as error:
            if error.errno in _ABSENT:
                return None

            raise

        return info

    def _modified(self, key: str, info: dict[str, Any]) -> datetime:
        """Return the time of a file's last change; a constant where it is not known."""
        modified = info.get("mtime", info.get("LastModified", info.get("created")))
        if isinstance(modified, datetime):
            return modified if modified.tzinfo is not None else modified.replace(tzinfo=UTC)

        return datetime.fromtimestamp(modified if isinstance(modified, int | float) else 0, UTC)

    def _into(self, operation: str, key: str, write: Callable[[str], object]) -> None:
        """Write a file, and make its directory if that is not there."""
        at = self._at(key)
        for left in range(_TRIES - 1, -1, -1):
            try:
                self._call(operation, key, write, at)
            except StorageError as error:
                if error.errno != errno.ENOENT or not left:
                    raise

                above = at.rpartition("/")[0]
                self._call(operation, key, lambda at: self._fs.makedirs(at, exist_ok=True), above)
            else:
                return

    def _call(self, operation: str, key: str, call: Callable[[str], T], at: str) -> T:
        with _translated(operation, self.path(key)):
            return call(at)

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _lock_of(self, key: str) -> Lock:
        return self._locks[hash(key) % _LOCKS]


@contextmanager
def _translated(operation: str, path: str) -> Generator[None]:
    """Turn what a file system raises into a `StorageError`: each has its client's own errors."""
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(operation, path, "nothing is there", errno.ENOENT) from error
    except FileExistsError as error:
        raise StorageError(operation, path, "is there already", errno.EEXIST) from error
    except PermissionError as error:
        raise AccessDeniedError(operation, path, str(error)) from error
    except (ConnectionError, TimeoutError) as error:
        raise UnreachableError(operation, path, f"{type(error).__name__}: {error}") from error
    except OSError as error:
        raise StorageError(operation, path, str(error), error.errno or errno.EIO) from error
    except Exception as error:
        raise StorageError(operation, path, f"{type(error).__name__}: {error}", errno.EIO) from error


def _tag(info: dict[str, Any]) -> str:
    """Return a value that changes with a file, made of all its properties, as fsspec's `ukey` is."""
    return hashlib.sha256(repr(sorted(info.items(), key=lambda item: item[0])).encode()).hexdigest()


def _above(key: str) -> Iterator[str]:
    """Yield the directories above a key, the innermost first."""
    while "/" in key:
        key = key.rpartition("/")[0]
        yield key


def fsspec_store(fs: Any, root: str = "", *, file_bytes: int = FILE_BYTES) -> BucketStore:
    """Return a store over an fsspec file system, for `Checkpointer(store=...)`.

    It works as a bucket does: a checkpoint is there once its mark is, which is written last. fsspec has no
    conditional requests, so the caller says by using it that one process at a time saves to a path; reports
    repeat it as `single_writer`. What a file system calls written counts as durable.

    Args:
        fs: A file system, as `fsspec.filesystem("memory")` returns.
        root: Where the path `/` of the store is in it, as in `"bucket/runs"`.
        file_bytes: The length of a data file, which is held in memory until it is written.

    Raises:
        SpecError: If `fs` is no fsspec file system.
    """
    if not all(hasattr(fs, name) for name in ("pipe_file", "cat_file", "info", "ls", "find", "rm_file")):
        raise SpecError(f"{fs!r} is no fsspec file system, as fsspec.filesystem('memory') returns one")

    objects = FsspecObjects(fs, root)
    return BucketStore("", _no_connection, file_bytes=file_bytes, single_writer=True, objects=objects)


def _no_connection(_: object) -> Any:
    raise AssertionError("the file system makes the requests")
