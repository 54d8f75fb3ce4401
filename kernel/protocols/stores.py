"""The protocol of every store of checkpoints, and what only some stores can do.

`Store` is the base class of all. What differs between stores without a caller having to know is a method with
a default there. Four kinds of stores can do more, and a caller asks for them by a property: `Directories`,
`SharedFiles`, `SystemFiles` and `ObjectStore`. It is a property and no `isinstance`, since a store that wraps
another one can do what that one can: `StoreWrapper`.

Readers hold a directory against deletion with `take_hold` and `hold_for_reading`.
"""

from __future__ import annotations

__all__ = (
    "BRIEF_WAITS_S",
    "DEFAULT_PLACEMENT",
    "BuildToken",
    "DataFile",
    "Directories",
    "Hold",
    "NoHold",
    "ObjectStore",
    "Placement",
    "ReadableFile",
    "ReadsRuns",
    "RequestFigures",
    "SharedFiles",
    "Snapshot",
    "Store",
    "StoreWrapper",
    "SummedReads",
    "SystemFiles",
    "Transfers",
    "WholeWrites",
    "hold_for_reading",
    "is_at_work",
    "take_hold",
)

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar, cast, final, runtime_checkable

import anyio

from penstock.kernel.errors import StorageError
from penstock.kernel.protocols.capability import Capability

if TYPE_CHECKING:
    from penstock.kernel.concurrency.threads import Threads

F = TypeVar("F", bound=Callable[..., Any])


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

    def since(self, before: RequestFigures) -> RequestFigures | None:
        """Return the requests since then; None if there is no server."""
        return self - before if self.n_sent else None


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
    """A `DataFile` that takes all of its bytes at once from where they are. Any other gathers them first."""

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


@runtime_checkable
class ReadsRuns(Capability, Protocol):
    """A `ReadableFile` that reads many short ranges nearly as fast as a long one."""

    def read_runs(self, offsets: Iterable[int], nbytes: int, buffer: memoryview) -> None:
        """Read ranges of one length into a buffer, one after another. Blocking.

        Args:
            offsets: Where each begins, in bytes from the beginning of the file; ascending.
            nbytes: Of each. They do not overlap.
            buffer: Has room for all of them, as bytes.

        Raises:
            TruncatedDataError: If the file ends before one of them does.
            StorageError: If the medium refuses.
        """
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """A store's preferences about bytes in data files. All in bytes."""

    file_bytes: int = 2 * 2**30  #: a data file that has grown so large is followed by another one
    page_bytes: int = 4096  #: large chunks begin at a multiple of it, for direct and mapped reads
    page_from_bytes: int = 2**20  #: a chunk this long is large
    line_bytes: int = 64  #: other chunks of a page or more begin at a multiple of it: jax uses them in place
    document_bytes: int = 2**20  #: a file shorter than this is written in one call, like a document
    full_files: int = 32  #: data files that may be full before they are made durable, together

    def step(self, nbytes: int) -> int:
        """Return the alignment of a chunk or a pack of so many bytes."""
        if nbytes >= self.page_from_bytes:
            return self.page_bytes

        return self.line_bytes if nbytes >= self.page_bytes else 1


DEFAULT_PLACEMENT: Final = Placement()
"""For a store that has no preference."""


class Hold(ABC):
    """The sole or shared right to a directory. It also ends with its process."""

    __slots__ = ()

    @abstractmethod
    def release(self) -> None:
        """Give it up. Idempotent; never fails."""

    def is_at(self, path: str) -> bool:
        """True if the held directory is still at `path`, as far as can be known. Blocking."""
        return True

    def confirm(self) -> None:  # noqa: B027 - a default
        """Return if it is still held. One that is a lease is renewed by that. Blocking.

        Raises:
            ClaimLostError: If another process holds it now.
            StorageError: If the medium does not say.
        """


@final
class NoHold(Hold):
    """The hold on a directory of a store without holds."""

    __slots__ = ()

    def release(self) -> None:
        """Do nothing."""


class Store(ABC):
    """A place for checkpoints. All methods block and are called from worker threads.

    The abstract ones are what every store has to say. The others have a default that holds for any store, and
    a store overrides what it can do better.

    Paths are absolute, with slashes. Every failure is a `StorageError` that names the path; where
    nothing is at a path, its `errno` is `ENOENT`. Methods may be called by several threads at once.

    An object store has no directories: there `make_directory` and `sync_directory` do nothing, and a
    published prefix is a directory.
    """

    __slots__ = ()

    @abstractmethod
    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """Return what is at `path`; None if nothing is. Before `publish`, nothing is at `final`."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the length in bytes of the file at `path`."""

    @abstractmethod
    def identity(self, path: str) -> object:
        """Return a value that differs once something else is at `path`; None if nothing is.

        What was built keeps its identity when it is published.
        """

    @abstractmethod
    def list_directory(self, path: str) -> Sequence[str]:
        """Return the names in the directory at `path`, in any order."""

    @abstractmethod
    def check_writable(self, path: str) -> None:
        """Raise `StorageError` if `path`, whose parents may be missing, could not be created.

        Writes nothing. A store that can only tell by trying does nothing.
        """

    @abstractmethod
    def make_directory(self, path: str) -> None:
        """Create the directory at `path` and its missing parents, durably. It may exist."""

    @abstractmethod
    def sync_directory(self, path: str) -> None:
        """Make the names in the directory at `path` durable, those of published checkpoints included."""

    @abstractmethod
    def remove_tree(self, path: str) -> None:
        """Remove the directory at `path` with all that is in it. It may be absent.

        Of a link to a directory, only the link is removed. What others create at `path` as soon as it is free
        stays. In a store of `Directories`, the caller holds it. In any other, the first
        step makes a published checkpoint invalid, and a checkpoint that is one file is removed, too.
        """

    @abstractmethod
    def read_file(self, path: str) -> bytes:
        """Return the content of the file at `path`."""

    @abstractmethod
    def write_file(self, path: str, data: bytes, *, create: bool = False) -> bool:
        """Write a whole file and make its content durable. Its name is durable after `sync_directory`.

        Args:
            path: Of the file, in a directory that exists.
            data: All of its content.
            create: Whether the file must be new. If several create it at once, one succeeds, and
                no reader ever sees a part of the content. By default an existing file is replaced.

        Returns:
            True if this call wrote the file. False, only with `create`, if it already existed with the same
            content. Then another writer may own it, and the caller must not remove it.

        Raises:
            StorageError: With `errno.EEXIST` if `create` is set and the file has another content.
        """

    def replace_file(self, path: str, data: bytes) -> None:
        """Write a whole file, and replace one that is there in one step, as `write_file` does in a bucket.

        Readers, and whoever comes after a crash, find all of what was there or all of the new content.
        """
        self.write_file(path, data)

    @abstractmethod
    def create_data_file(self, path: str) -> DataFile:
        """Create a file at `path`, where nothing is yet, for writing at chosen offsets."""

    @abstractmethod
    def open_data_file(self, path: str) -> ReadableFile:
        """Open the file at `path` for reading at chosen offsets."""

    @abstractmethod
    def begin_build(self, final: str, beside: str, file: str | None = None) -> BuildToken:
        """Give a place to build what will be published at `final`.

        The place is not created, and may hold what an interrupted save left; the caller removes that
        with `remove_tree` and creates the place: with `make_held` in a store of
        `Directories`, else with `make_directory`.

        Args:
            final: The path to publish.
            beside: A path next to it that a store with renames may use as the place.
            file: The one file, relative to the place, that will become `final`; None if all will.

        Raises:
            InUseError: If another save is building there. A store of `Directories` need not look: the caller
                holds the place.
            StorageError: With `errno.EEXIST` if something is at `final` and nothing can be built next to it.
        """

    @abstractmethod
    def publish(self, token: BuildToken) -> None:
        """Make visible at `final`, in one step, what was built. All of it was made durable before.

        The publication itself is durable when `sync_directory` of the directory above has returned.

        Raises:
            StorageError: With `errno.EEXIST` if something is at `final`. Nothing has changed then.
            BuildChangedError: If another program moved what was built, or what is at `final` now is
                something else.
        """

    @abstractmethod
    def discard(self, token: BuildToken) -> None:
        """Remove what is left at the place of a save, and give up its claim. Idempotent.

        Before publication that is all that was built; afterwards it is what the publication left
        over, such as what was replaced. Never removes what another save wrote.

        Raises:
            BuildChangedError: If what was published is not at `final` any more. Then what it replaced stays.
            StorageError: If the medium refuses.
        """

    @property
    def directories(self) -> Directories | None:
        """This store, if its directories can be renamed and held; None if not.

        Without it, a checkpoint is replaced only by deleting it first, and a deleted step cannot be moved.
        """
        return None

    @property
    def shared_files(self) -> SharedFiles | None:
        """This store, if its files can be mapped, and written by several processes at once; None if not.

        Without it, both are refused.
        """
        return None

    @property
    def system_files(self) -> SystemFiles | None:
        """This store, if its files are those of the operating system; None if not.

        Without it, leaf handlers that write files themselves are refused.
        """
        return None

    @property
    def objects(self) -> ObjectStore | None:
        """This store, if it keeps objects of a server and has neither renames nor locks; None if not."""
        return None

    @property
    def placement(self) -> Placement:
        """The best way to place bytes in data files. Does not block, and is always the same."""
        return DEFAULT_PLACEMENT

    @property
    def over_network(self) -> bool:
        """True if bytes may be damaged on their way although they are stored well. False by default.

        What does not fit its checksum is read once more there before that is an error.
        """
        return False

    def hold(self, path: str) -> Hold:
        """Hold the directory at `path` exclusively, so that only one save at a time builds there.

        The hold stays with the directory when it is renamed. By default nothing is held: then `begin_build`
        itself keeps a second save out.

        Raises:
            InUseError: If anybody holds it, in this process or another.
        """
        return NoHold()

    def hold_reading(self, path: str) -> Hold:
        """Hold the directory at `path`, shared with other readers; `hold` fails meanwhile.

        By default nothing is held: then a checkpoint may be deleted while it is read.

        Raises:
            InUseError: If it is held exclusively or is being replaced.
            StorageError: With `errno.ENOENT` if there is nothing.
        """
        return NoHold()

    def list_folders(self, path: str) -> Sequence[str]:
        """Return the names of the directories in the directory at `path`."""
        names = self.list_directory(path)
        return [name for name in names if self.kind(os.path.join(path, name)) == "directory"]

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        """Return the content of each file; None where there is no file."""
        return [self._read_if_there(path) for path in paths]

    def _read_if_there(self, path: str) -> bytes | None:
        try:
            return self.read_file(path)
        except StorageError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}:
                return None

            raise

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        """Return the length of each file in bytes; -1 for a directory, None where there is nothing."""
        sizes = {"directory": -1, None: None}
        kinds = [(path, self.kind(path)) for path in paths]
        return [self.size(path) if kind == "file" else sizes[kind] for path, kind in kinds]

    def data_sizes(self, paths: Iterable[str]) -> Sequence[int]:
        """Return the bytes of each file that take room on the medium; 0 for what is no file.

        By default files are what they seem, and have no holes.
        """
        return [max(size or 0, 0) for size in self.file_sizes(paths)]

    def check_links(self, root: str, directory: str) -> None:  # noqa: B027 - a default
        """Refuse symbolic links below `directory` that lead out of `root`. By default there are none.

        Args:
            root: A checkpoint; may be a link itself.
            directory: The part of it to look at; `root` or a directory below it.

        Raises:
            LinkOutsideError: If there is one, and the store does not allow it.
        """

    def create_long_file(self, path: str, nbytes: int) -> DataFile:
        """Create a file as `create_data_file` does, of which every byte is written once, in any order.

        It is there, all at once, when `sync` returns. That may take longer than all writes took. By default
        it is as any other; a store that holds a data file in memory until it is complete does better.

        Raises:
            StorageError: With `errno.EFBIG` if the store can have no file of that length.
        """
        return self.create_data_file(path)

    def share(self, source: str, destination: str) -> Literal["link", "copy"]:
        """Make `destination`, which must not exist, a second file with the content of `source`.

        No byte of it is sent again. Either may be removed without the other. The content is durable, even if
        that of `source` was not.

        Returns:
            `link` if both are one file that takes its room once; `copy` if the store copied it.

        Raises:
            StorageError: With EXDEV, EPERM, EMLINK or ENOTSUP if the store cannot do it there. By default it
                never can: the bytes are written anew.
        """
        raise StorageError("share", destination, "the store has no second names for a file", errno.ENOTSUP)

    def sync_file(self, path: str) -> None:  # noqa: B027 - a default
        """Make the content of the file at `path` durable, also if others wrote it. By default it is."""

    def free_bytes(self, path: str) -> int | None:
        """Return how many bytes can still be written at `path`, whose parents may be absent; None if unknown.

        Quick: it is asked once for each save. If it is unknown, a save begins and fails when the store is
        full.
        """
        return None

    def kvstore_spec(self, directory: str) -> dict[str, Any] | None:
        """Return the TensorStore kvstore spec of the keys below `directory`; None if TensorStore has none.

        Without one a restore refuses indexes that TensorStore compressed, and chunks with a codec that have
        no recorded checksum.
        """
        return None

    def close(self) -> None:  # noqa: B027 - a default
        """Close connections and mappings that are not in use. The store can be used again."""

    def request_figures(self) -> RequestFigures:
        """Return what a server was asked so far. Does not block. By default there is no server."""
        return RequestFigures()

    def relies_on_single_writer(self) -> bool:
        """True if no other process may save to the same paths, since the store could not find that out.

        Does not block. Known once a save has begun.
        """
        return False


class Directories(Store):
    """A store whose directories can be renamed, exchanged and held, as those of a file system.

    What is built gets its name when it is complete. `hold` and `hold_reading` hold something there.
    """

    __slots__ = ()

    @property
    def directories(self) -> Directories | None:
        return self

    @abstractmethod
    def rename(self, source: str, destination: str) -> None:
        """Rename a directory or a file in one step.

        Raises:
            StorageError: With `errno.EEXIST` if something is at the destination.
        """

    @abstractmethod
    def exchange(self, token: BuildToken) -> str | None:
        """Publish as `Store.publish` does, swapping the build place with what is at `final`.

        In one step, so that `final` is never absent. The caller holds what is replaced until `Store.discard`
        has removed it.

        Returns:
            Where what was replaced is until then; None for the place where the new one was built.

        Raises:
            BuildChangedError: If what is at `final` now is not what was built.
        """

    @abstractmethod
    def hold(self, path: str) -> Hold: ...

    @abstractmethod
    def make_held(self, path: str) -> Hold:
        """Create the directory at `path`, held exclusively from the first, and its missing parents, durably.

        Its own name need not be durable: what is built there is published under another one, which is. If it
        fails, nothing is left at `path`.

        Raises:
            InUseError: If something is there already. If several create it at once, one succeeds.
        """

    @abstractmethod
    def hold_reading(self, path: str) -> Hold: ...


class SharedFiles(Store):
    """A store whose files can be mapped, and written by several processes at once."""

    __slots__ = ()

    @property
    def shared_files(self) -> SharedFiles | None:
        return self

    @abstractmethod
    def map_file(self, path: str) -> memoryview:
        """Return the bytes of an unchanging file, read-only. They are read on access.

        They stay until the last view of them is gone, also when the file is removed.
        """

    @abstractmethod
    def open_for_writing(self, path: str) -> DataFile:
        """Open a data file that some process has created with `create_data_file`, and closed.

        Several processes write it at once, each its own ranges. `sync` makes durable what is written
        through this object; `allocate` is not called.

        Raises:
            StorageError: If it is not there.
        """


class SystemFiles(SharedFiles):
    """A store whose paths are those of the operating system, so that other libraries can write there."""

    __slots__ = ()

    @property
    def system_files(self) -> SystemFiles | None:
        return self

    @abstractmethod
    def sync_tree(self, path: str) -> None:
        """Make every file and directory at and below `path` durable, also if another program wrote it."""


class ObjectStore(Store):
    """A store of objects without renames and locks, as a bucket, that each question costs a request.

    A directory is a checkpoint there once its mark is in it, `commit_success.txt`; what has no mark is none.
    Builds and holds are leases: they end by themselves when they are not renewed in time. A caller that needs
    what was not renewed takes it over, and the old holder can publish and delete nothing more.
    """

    __slots__ = ()

    @property
    def objects(self) -> ObjectStore | None:
        return self

    @abstractmethod
    def marked_folders(self, path: str, among: Collection[str] | None = None) -> Sequence[str]:
        """Return the names of the directories with a mark that are right below `path`.

        Args:
            path: A directory; if nothing is there, the result is empty.
            among: Look at these names alone.
        """

    @abstractmethod
    def is_unmarked(self, path: str) -> bool:
        """True if something is at `path` that is no checkpoint, holds none, and that no save claims."""

    @abstractmethod
    def collect(
        self, path: str, older_than_s: float | None = None
    ) -> Mapping[str, Literal["removed", "published", "kept"]]:
        """Remove what ended processes left at a path and right below it, or publish what was whole.

        Args:
            path: Of a checkpoint, or of a directory of them.
            older_than_s: What says nothing of its process that can be asked, as on another machine, counts
                as left once it has not changed for so many seconds, even if its lease is longer.

        Returns:
            By path, what became of each; `kept` where somebody may be at work.
        """

    @abstractmethod
    def begin_shared_build(self, final: str, beside: str) -> BuildToken:
        """Give several processes a place to build, as `Store.begin_build` does. No other build ever has it.

        This process alone publishes or discards it. What all wrote goes when it is discarded.
        """

    @abstractmethod
    def join_build(self, final: str, place: str) -> BuildToken:
        """Write into what another process builds at `place`. To discard it forgets it, without a request.

        At the place is a directory as long as the other process may still publish.
        """

    @abstractmethod
    def take_back(self, token: BuildToken) -> bool:
        """Take a build that was joined away from the process that began it.

        Returns:
            Whether that process can publish it no more. False, too, if it has published it.

        Raises:
            StorageError: If that is not known.
        """

    @property
    @abstractmethod
    def lease_s(self) -> float:
        """After how many seconds without renewal builds and holds end."""

    @abstractmethod
    def hold_root(self, path: str) -> Hold:
        """Hold the sole right to write into a directory, under the name `path` in it.

        Raises:
            InUseError: If another one holds it.
        """

    @abstractmethod
    def renew_leases(self) -> None:
        """Renew all builds and holds of this store object. A medium that does not answer is no failure."""

    @abstractmethod
    def snapshot(self, path: str) -> Snapshot | None:
        """List the checkpoint at `path`.

        Returns:
            None if there is none right there, or if it is too large to be listed.
        """

    @abstractmethod
    def shared_snapshot(self, path: str, encoded: bytes) -> Snapshot | None:
        """Return what another process knows of the checkpoint at `path`. Asks nothing.

        Whether it is still there, `Snapshot.is_current` says.

        Returns:
            None if it cannot be read.
        """


BRIEF_WAITS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Publishing and deleting hold a checkpoint exclusively, but only briefly: how long to wait for them."""


def is_at_work(store: Store, path: str) -> bool:
    """True if a live process builds or writes in the directory at `path`. Blocking.

    False if that is not known. Looking holds the directory for a moment, as a reader does.
    """
    try:
        store.hold_reading(path).release()
    except StorageError as error:
        return error.errno == errno.EBUSY

    return False


@asynccontextmanager
async def hold_for_reading(store: Store, threads: Threads, path: str) -> AsyncGenerator[None]:
    """Hold the directory at `path` against deletion, in a store that can.

    Never fails because of `path`: if nothing is there, the following read reports it.
    """
    held = await take_hold(store, threads, path)
    try:
        yield
    finally:
        held.release()


async def take_hold(
    store: Store, threads: Threads, path: str, hold: Callable[[str], Hold] | None = None
) -> Hold:
    """Hold the directory at `path` until the result is released, by default as `hold_for_reading` does.

    Args:
        store: Where it is.
        threads: For blocking calls.
        path: The directory.
        hold: What takes another hold; what it raises in the end is raised.
    """
    if hold is None and store.directories is None:  # nothing is held there: a hop to a thread is saved
        return NoHold()

    taken: list[Hold] = []  # filled by the thread: if the task is cancelled meanwhile, it is released here
    take, waits = hold or store.hold_reading, iter(BRIEF_WAITS_S)
    while True:
        try:
            await threads.run(lambda: taken.append(take(path)))
            return taken[0]
        except StorageError as error:
            wait_s = next(waits, None)
            if error.errno != errno.EBUSY or wait_s is None:
                if hold is not None:
                    raise

                return NoHold()  # a medium without holds can still be read, which is all the caller needs
        except BaseException:
            for one in taken:
                one.release()

            raise

        await anyio.sleep(wait_s)


class Snapshot(Store):
    """A store to read one checkpoint from, that knows most answers. It can do what the store can.

    Of the checkpoint it answers as it was when it was listed; what it does not know it asks the store.
    """

    @abstractmethod
    def reads(self) -> Sequence[Callable[[], None]]:
        """Return what reads documents before they are asked for. Blocking; may be called side by side."""

    @abstractmethod
    def settle(self) -> Snapshot | None:
        """Check that the checkpoint was not replaced during the `reads`. Blocking; called after them.

        Returns:
            None if all belongs to one checkpoint. Else another snapshot, to begin anew with.

        Raises:
            StorageError: With `errno.ENOENT` if the checkpoint is gone.
        """

    @abstractmethod
    def identity_now(self) -> object:
        """Return the identity of the checkpoint now. Asks only if anything was asked after it was known."""

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether the checkpoint still has this identity. Blocking; for a snapshot from earlier."""

    @abstractmethod
    def encoded(self) -> bytes:
        """Encode the settled snapshot for other processes. Blocking."""


def _passed_on(method: F) -> F:
    """Return a method of a `StoreWrapper` that has the inner store do an operation of this name."""
    operation = method.__name__

    def passed_on(self: StoreWrapper, *given: Any, **options: Any) -> Any:
        return self.call(operation, *given, **options)

    passed_on.__name__, passed_on.__doc__ = operation, method.__doc__
    return cast("F", passed_on)


class StoreWrapper(Directories, SystemFiles, ObjectStore):
    """A store that passes calls on to another one. It has the capabilities of that one, and no more.

    A subclass overrides the operations that it changes. All others go through `call`.

    Args:
        inner: The other store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def call(self, operation: str, *given: Any, **options: Any) -> Any:
        """Have the inner store do an operation, which is the name of a method."""
        return getattr(self.inner, operation)(*given, **options)

    @property
    def directories(self) -> Directories | None:
        return None if self.inner.directories is None else self

    @property
    def shared_files(self) -> SharedFiles | None:
        return None if self.inner.shared_files is None else self

    @property
    def system_files(self) -> SystemFiles | None:
        return None if self.inner.system_files is None else self

    @property
    def objects(self) -> ObjectStore | None:
        return None if self.inner.objects is None else self

    @property
    def placement(self) -> Placement:
        return self.inner.placement

    @property
    def over_network(self) -> bool:
        return self.inner.over_network

    @property
    def lease_s(self) -> float:
        objects = self.inner.objects
        assert objects is not None, "asked before"
        return objects.lease_s

    kind = _passed_on(Store.kind)
    size = _passed_on(Store.size)
    identity = _passed_on(Store.identity)
    list_directory = _passed_on(Store.list_directory)
    check_writable = _passed_on(Store.check_writable)
    make_directory = _passed_on(Store.make_directory)
    sync_directory = _passed_on(Store.sync_directory)
    remove_tree = _passed_on(Store.remove_tree)
    read_file = _passed_on(Store.read_file)
    write_file = _passed_on(Store.write_file)
    replace_file = _passed_on(Store.replace_file)
    create_data_file = _passed_on(Store.create_data_file)
    open_data_file = _passed_on(Store.open_data_file)
    begin_build = _passed_on(Store.begin_build)
    publish = _passed_on(Store.publish)
    discard = _passed_on(Store.discard)
    hold = _passed_on(Store.hold)
    hold_reading = _passed_on(Store.hold_reading)
    list_folders = _passed_on(Store.list_folders)
    read_files = _passed_on(Store.read_files)
    file_sizes = _passed_on(Store.file_sizes)
    data_sizes = _passed_on(Store.data_sizes)
    check_links = _passed_on(Store.check_links)
    create_long_file = _passed_on(Store.create_long_file)
    share = _passed_on(Store.share)
    sync_file = _passed_on(Store.sync_file)
    free_bytes = _passed_on(Store.free_bytes)
    kvstore_spec = _passed_on(Store.kvstore_spec)
    close = _passed_on(Store.close)
    request_figures = _passed_on(Store.request_figures)
    relies_on_single_writer = _passed_on(Store.relies_on_single_writer)
    rename = _passed_on(Directories.rename)
    exchange = _passed_on(Directories.exchange)
    make_held = _passed_on(Directories.make_held)
    sync_tree = _passed_on(SystemFiles.sync_tree)
    map_file = _passed_on(SharedFiles.map_file)
    open_for_writing = _passed_on(SharedFiles.open_for_writing)
    marked_folders = _passed_on(ObjectStore.marked_folders)
    is_unmarked = _passed_on(ObjectStore.is_unmarked)
    collect = _passed_on(ObjectStore.collect)
    begin_shared_build = _passed_on(ObjectStore.begin_shared_build)
    join_build = _passed_on(ObjectStore.join_build)
    take_back = _passed_on(ObjectStore.take_back)
    hold_root = _passed_on(ObjectStore.hold_root)
    renew_leases = _passed_on(ObjectStore.renew_leases)
    snapshot = _passed_on(ObjectStore.snapshot)
    shared_snapshot = _passed_on(ObjectStore.shared_snapshot)
