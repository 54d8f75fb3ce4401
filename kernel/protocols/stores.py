"""The interface of what checkpoints lie in: every file operation penstock does, and no other."""

from __future__ import annotations

__all__ = (
    "DataFile",
    "FolderListing",
    "Hold",
    "ManyFiles",
    "ReadHolds",
    "ReadableFile",
    "Store",
)

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

from penstock.kernel.protocols.transfers import Transfers


class DataFile(Protocol):
    """A file being written at chosen offsets, by several threads at once."""

    @property
    def transfers(self) -> Transfers:
        """Bytes written so far, by way."""
        ...

    def allocate(self, nbytes: int) -> None:
        """Reserve room for the first `nbytes`, where that can be done; `sync` gives back what is over.

        Raises:
            StorageError: If there is no room.
        """
        ...

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers one after another, beginning at `offset`; never short."""
        ...

    def sync(self) -> None:
        """Make every byte durable, and the file end with the last one. If it fails: never retried."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class ReadableFile(Protocol):
    """A file being read at chosen offsets, by several threads at once."""

    @property
    def transfers(self) -> Transfers:
        """Bytes read so far, by way."""
        ...

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, beginning at `offset`.

        Raises:
            TruncatedDataError: If the file ends before the buffers are full.
        """
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Hold(Protocol):
    """A directory held against others; given up when its process dies, too."""

    def release(self) -> None:
        """Idempotent; never fails."""
        ...


class Store(Protocol):
    """Every file operation penstock does, and no other. All blocking; called from worker threads.

    Paths are absolute. Failures are `StorageError`s. So small that a test double can stop after
    the k-th operation, drop what was not synced, tear a write, or run out of space.
    """

    def kind(self, path: str) -> Literal["file", "directory"] | None: ...
    def size(self, path: str) -> int:
        """Bytes in the file at `path`."""
        ...

    def identity(self, path: str) -> object:
        """A value that differs once something else lies at `path`; None while nothing does."""
        ...

    def check_writable(self, path: str) -> None:
        """Raise `StorageError` unless `path`, whose parents may be missing, could be created."""
        ...

    def make_directory(self, path: str) -> None:
        """Create it and its missing parents, durably; it may exist."""
        ...

    def hold(self, path: str) -> Hold:
        """Hold the directory at `path`, so that one save at a time builds there.

        Raises:
            StorageError: With `errno.EBUSY` if somebody holds it, in this process or another.
        """
        ...

    def list_directory(self, path: str) -> Sequence[str]: ...
    def read_file(self, path: str) -> bytes: ...
    def write_file(self, path: str, data: bytes) -> None:
        """Create (or replace) and make the content durable; the directory entry is not yet."""
        ...

    def create_data_file(self, path: str) -> DataFile: ...
    def open_data_file(self, path: str) -> ReadableFile: ...
    def map_file(self, path: str) -> memoryview:
        """The bytes of a file that nobody changes, read-only and read when they are looked at.

        They stay until the last view of them is gone, whatever happens to the file's name.
        """
        ...

    def link(self, source: str, destination: str) -> None:
        """Give a file a second name, so that it stays until both are removed.

        Raises:
            StorageError: If the store cannot, or cannot here (EXDEV, EPERM, EMLINK, ENOTSUP).
        """
        ...

    def sync_directory(self, path: str) -> None: ...
    def sync_tree(self, path: str) -> None:
        """Make durable every file and directory at and below `path`, whoever wrote it."""
        ...

    def rename(self, source: str, destination: str) -> None:
        """Atomic; the destination does not exist."""
        ...

    def exchange(self, first: str, second: str) -> None:
        """Swap two directories in one step, so that neither name is ever absent."""
        ...

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; it may be absent."""
        ...


@runtime_checkable
class FolderListing(Protocol):
    """What a `Store` may add, so that directories are told from files without looking at each."""

    def list_folders(self, path: str) -> Sequence[str]:
        """Names of the directories in the directory at `path`."""
        ...


@runtime_checkable
class ManyFiles(Protocol):
    """What a `Store` may add, so that a file for each leaf costs no more than it must."""

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        """What each file holds; None where there is none, but nothing or a directory."""
        ...

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        """Bytes in each file; -1 of a directory, and None where there is nothing."""
        ...


@runtime_checkable
class ReadHolds(Protocol):
    """What a `Store` may add, so that nothing is deleted while it is read."""

    def hold_reading(self, path: str) -> Hold:
        """Hold the directory at `path` beside other readers; `Store.hold` fails meanwhile.

        Raises:
            StorageError: With `errno.EBUSY` if somebody holds it alone, or puts something else there just
                now; with `errno.ENOENT` if there is nothing.
        """
        ...
