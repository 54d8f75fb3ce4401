"""The protocol of every store of checkpoints.

`Store` is the required part, and all that a save and a restore need. What only some stores can do
(exchange two directories, map a file, hold a directory) is in `store_capabilities`.
"""

from __future__ import annotations

__all__ = (
    "BuildToken",
    "DataFile",
    "ReadableFile",
    "RequestFigures",
    "Store",
    "SummedReads",
    "Transfers",
    "WholeWrites",
)

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, final, runtime_checkable

from penstock.kernel.protocols.capability import Capability


@final
@dataclass(frozen=True, slots=True)
class Transfers:
    """Bytes of one file or of several, by the way they took.

    Of a direct transfer, the bytes at its edges that share a page with other bytes count as buffered.
    """

    direct_bytes: int = 0  #: past the page cache (O_DIRECT)
    buffered_bytes: int = 0  #: through the page cache, or through a buffer of the store

    def __add__(self, other: Transfers) -> Transfers:
        return Transfers(self.direct_bytes + other.direct_bytes, self.buffered_bytes + other.buffered_bytes)


@final
@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Requests to a server, and what became of them."""

    n_sent: int = 0  #: each try counts; of uploads in parts and of copies, each call
    n_repeated: int = 0  #: tries that failed, and were made again
    n_refused: int = 0  #: tries for which the server was too busy
    waited_s: float = 0.0  #: before tries, of all threads together

    def __add__(self, other: RequestFigures) -> RequestFigures:
        return RequestFigures(
            self.n_sent + other.n_sent,
            self.n_repeated + other.n_repeated,
            self.n_refused + other.n_refused,
            self.waited_s + other.waited_s,
        )

    def __sub__(self, other: RequestFigures) -> RequestFigures:
        return RequestFigures(
            self.n_sent - other.n_sent,
            self.n_repeated - other.n_repeated,
            self.n_refused - other.n_refused,
            self.waited_s - other.waited_s,
        )


class DataFile(Protocol):
    """A new file, written at chosen offsets by several threads at once."""

    @property
    def transfers(self) -> Transfers:
        """Bytes written so far, by the way they took."""
        ...

    def allocate(self, nbytes: int) -> None:
        """Reserve room for the first `nbytes` bytes; a store that cannot does nothing.

        `sync` gives back what was reserved and not written.

        Raises:
            StorageError: If there is no room.
        """
        ...

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers one after another from `offset`. Writes everything or raises.

        The buffers may be reused as soon as this returns.
        """
        ...

    def sync(self) -> None:
        """Make every byte durable and end the file after the last one. Not retried after a failure."""
        ...

    def close(self) -> None:
        """Close the file. Idempotent."""
        ...


class ReadableFile(Protocol):
    """An existing file, read at chosen offsets by several threads at once."""

    @property
    def transfers(self) -> Transfers:
        """Bytes read so far, by the way they took."""
        ...

    def read_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers one after another, beginning at `offset`.

        Raises:
            TruncatedDataError: If the file ends before the buffers are full.
        """
        ...

    def close(self) -> None:
        """Close the file. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class BuildToken:
    """A store's grant to one save: a place to build, and the right to publish what is built there."""

    final: str  #: the path that will be published
    place: str  #: the directory to build in; files have the paths below it that they will have below `final`
    file: str | None = None
    """The one file, or the one directory, below `place` that becomes `final`; None if all of `place` does."""
    claim: object = None  #: whatever the store recognises the save by

    @property
    def built(self) -> str:
        """The path, before publication, of what becomes `final`."""
        return self.place if self.file is None else os.path.join(self.place, self.file)


@runtime_checkable
class WholeWrites(Capability, Protocol):
    """A `DataFile` that takes all of its bytes at once from where they lie. Any other gathers them first."""

    def write_whole(self, buffer: memoryview) -> None:
        """Write the whole file, durably. Nothing else was or will be written to it.

        The buffer may be reused as soon as this returns.

        Raises:
            StorageError: If the medium refuses, or something was written before.
        """
        ...


@runtime_checkable
class SummedReads(Capability, Protocol):
    """A `ReadableFile` that computes checksums as it reads, while the bytes are in the processor's cache.

    Of any other, bytes are read first and summed when they are all there.
    """

    def read_summed(self, offset: int, buffer: memoryview) -> int:
        """Fill one buffer as `ReadableFile.read_at` does, and return the crc32c of its bytes. Blocking.

        Raises:
            TruncatedDataError: If the file ends before the buffer is full.
            StorageError: If the medium refuses.
        """
        ...


class Store(Protocol):
    """The file operations that every store has. All of them block and are called from worker threads.

    Paths are absolute, with slashes. Every failure is a `StorageError` that names the path; where
    nothing lies at a path, its `errno` is `ENOENT`. Methods may be called by several threads at once.

    An object store has no directories: there `make_directory` and `sync_directory` do nothing, and a
    published prefix is a directory.
    """

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """Return what lies at `path`; None if nothing does. Before `publish`, nothing lies at `final`."""
        ...

    def size(self, path: str) -> int:
        """Return the length in bytes of the file at `path`."""
        ...

    def identity(self, path: str) -> object:
        """Return a value that differs once something else lies at `path`; None if nothing does.

        What was built keeps its identity when it is published.
        """
        ...

    def list_directory(self, path: str) -> Sequence[str]:
        """Return the names in the directory at `path`, in any order."""
        ...

    def check_writable(self, path: str) -> None:
        """Raise `StorageError` if `path`, whose parents may be missing, could not be created.

        Writes nothing. A store that can only tell by trying does nothing.
        """
        ...

    def make_directory(self, path: str) -> None:
        """Create the directory at `path` and its missing parents, durably. It may exist."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in the directory at `path` durable, those of published checkpoints included."""
        ...

    def remove_tree(self, path: str) -> None:
        """Remove the directory at `path` with all that is in it. It may be absent.

        Of a link to a directory, only the link is removed. What others create at `path` as soon as it is free
        stays. On a `BuildHolds`, the caller holds the directory. Unless the store is a `Renames`, the first
        step makes a published checkpoint invalid, and a checkpoint that is one file is removed, too.
        """
        ...

    def read_file(self, path: str) -> bytes:
        """Return the content of the file at `path`."""
        ...

    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        """Write a whole file and make its content durable. Its name is durable after `sync_directory`.

        Args:
            path: Of the file, in a directory that exists.
            data: All of its content.
            create: Whether the file must be new. If several create it at once, one succeeds, and
                nobody ever reads a part of the content. By default an existing file is replaced.

        Returns:
            True if this call wrote the file. False, only with `create`, if it already existed with the same
            content. Then another writer may own it, and the caller must not remove it.

        Raises:
            StorageError: With `errno.EEXIST` if `create` is set and the file has another content.
        """
        ...

    def create_data_file(self, path: str) -> DataFile:
        """Create a file at `path`, where nothing lies yet, for writing at chosen offsets."""
        ...

    def open_data_file(self, path: str) -> ReadableFile:
        """Open the file at `path` for reading at chosen offsets."""
        ...

    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        """Give a place to build what will be published at `final`.

        The place is not created, and may hold what an interrupted save left; the caller removes that
        with `remove_tree` and creates the place: with `make_held` on a `BuildHolds`, else with
        `make_directory`.

        Args:
            final: The path to publish.
            beside: A path next to it that a store with renames may use as the place.
            file: The one file, relative to the place, that will become `final`; None if all will.

        Raises:
            InUseError: If another save is building there. A store that is a `BuildHolds` need not look: the
                caller holds the place.
            StorageError: With `errno.EEXIST` if something lies at `final` and nothing can be built beside it.
        """
        ...

    def publish(self, token: BuildToken) -> None:
        """Make visible at `final`, in one step, what was built. All of it was made durable before.

        The publication itself is durable when `sync_directory` of the directory above has returned.

        Raises:
            StorageError: With `errno.EEXIST` if something lies at `final`. Nothing has changed then.
            BuildChangedError: If another program moved what was built, or what lies at `final` now is
                something else.
        """
        ...

    def discard(self, token: BuildToken) -> None:
        """Remove what is left at the place of a save, and give up its claim. Idempotent.

        Before publication that is all that was built; afterwards it is what the publication left
        over, such as what was replaced. Never removes what another save wrote.

        Raises:
            BuildChangedError: If what was published is not at `final` any more. Then what it replaced stays.
            StorageError: If the medium refuses.
        """
        ...
