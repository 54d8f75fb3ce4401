"""Optional capabilities of stores: small protocols, tested with `isinstance` where they matter.

A store that wraps another one has exactly the capabilities of that one.
"""

from __future__ import annotations

__all__ = (
    "DEFAULT_PLACEMENT",
    "BuildHolds",
    "CountedRequests",
    "Exchanges",
    "FolderListing",
    "ForeignFiles",
    "FreeSpace",
    "Hold",
    "KvStoreSpecs",
    "LeasedHold",
    "Leases",
    "Leftovers",
    "LongFiles",
    "ManyFiles",
    "MappedFiles",
    "MarkedCheckpoints",
    "OverNetwork",
    "PlacedHold",
    "Placement",
    "PreferredPlacement",
    "ReadHolds",
    "Renames",
    "SharedBuilds",
    "SharedFiles",
    "SingleWriter",
    "Snapshot",
    "Snapshots",
    "SyncsFiles",
    "UntrustedFiles",
    "WritableTogether",
    "foreign_files",
    "placement_of",
    "requests_of",
)

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

from penstock.kernel.errors import UnsupportedByStoreError
from penstock.kernel.protocols.capability import Capability
from penstock.kernel.protocols.stores import BuildToken, DataFile, RequestFigures, Store


@runtime_checkable
class Exchanges(Capability, Protocol):
    """A store that can replace a checkpoint. On any other, `overwrite=True` is refused."""

    def exchange(self, token: BuildToken) -> str | None:
        """Publish as `Store.publish` does, swapping the build place with what lies at `final`.

        In one step, so that `final` is never absent. On a store with holds, the caller holds what is replaced
        until `Store.discard` has removed it.

        Returns:
            Where what was replaced lies until then; None for the place where the new one was built.

        Raises:
            BuildChangedError: If what lies at `final` now is not what was built.
        """
        ...


@runtime_checkable
class Renames(Capability, Protocol):
    """A store that can move a checkpoint. On any other, deleted steps cannot be moved to a trash folder."""

    def rename(self, source: str, destination: str) -> None:
        """Rename a directory in one step.

        Raises:
            StorageError: With `errno.EEXIST` if something lies at the destination.
        """
        ...


@runtime_checkable
class SharedFiles(Capability, Protocol):
    """A store that can put a file into a second checkpoint without sending its bytes again."""

    def share(self, source: str, destination: str) -> Literal["link", "copy"]:
        """Make `destination`, which must not exist, a second file with the content of `source`.

        Either may be removed without the other. The content is durable, even if that of `source` was not.

        Returns:
            `link` if both are one file that takes its room once; `copy` if the store copied it.

        Raises:
            StorageError: With EXDEV, EPERM, EMLINK or ENOTSUP if the store cannot do it there.
        """
        ...


@runtime_checkable
class WritableTogether(Capability, Protocol):
    """A store with files that several processes write at once, each ranges of its own."""

    def open_for_writing(self, path: str) -> DataFile:
        """Open a data file that some process has created with `create_data_file`, and closed.

        `sync` makes durable what is written through this object; `allocate` is not called.

        Raises:
            StorageError: If it is not there.
        """
        ...


@runtime_checkable
class LongFiles(Capability, Protocol):
    """A store that holds a data file in memory until it is complete, and can do better if it is long.

    On any other, a data file of any length takes the memory of its writes alone.
    """

    def create_long_file(self, path: str, nbytes: int) -> DataFile:
        """Create a file as `Store.create_data_file` does, of which every byte is written once, in any order.

        It is there, all at once, when `sync` returns. That may take longer than all writes took.

        Raises:
            StorageError: With `errno.EFBIG` if the store can have no file of that length.
        """
        ...


@runtime_checkable
class SharedBuilds(Capability, Protocol):
    """A store without renames, into whose builds other processes write by what the place says.

    On any other, several processes build in a directory that each of them sees by its path.
    """

    def begin_shared_build(self, final: str, beside: str) -> BuildToken:
        """Give a place to build, as `Store.begin_build` does. No other build ever has that place.

        This process alone publishes or discards it. What all wrote goes when it is discarded.
        """
        ...

    def join_build(self, final: str, place: str) -> BuildToken:
        """Write into what another process builds at `place`. To discard it forgets it, and asks nobody.

        At the place is a directory as long as the other process may still publish.
        """
        ...

    def take_back(self, token: BuildToken) -> bool:
        """Take a build that was joined away from the process that began it.

        Returns:
            Whether that process can publish it no more. False, too, if it has published it.

        Raises:
            StorageError: If that is not known.
        """
        ...


@runtime_checkable
class SyncsFiles(Capability, Protocol):
    """A store whose files are perhaps not durable, if others wrote them. On any other, they are."""

    def sync_file(self, path: str) -> None:
        """Make the content of the file at `path` durable, whoever wrote it.

        May do nothing if this store made it durable before.
        """
        ...


@runtime_checkable
class MappedFiles(Capability, Protocol):
    """A store whose files can be mapped into memory. On any other, `restore(mmap=True)` is refused."""

    def map_file(self, path: str) -> memoryview:
        """Return the bytes of an unchanging file, read-only. They are read on access.

        They stay until the last view of them is gone, also when the file is removed.
        """
        ...


@runtime_checkable
class ForeignFiles(Capability, Protocol):
    """A store whose paths are those of the operating system, so that other libraries can write there.

    On any other, leaf handlers that write files themselves are refused.
    """

    def sync_tree(self, path: str) -> None:
        """Make every file and directory at and below `path` durable, whoever wrote it."""
        ...


@runtime_checkable
class FreeSpace(Capability, Protocol):
    """A store that knows how much room is left. On any other, a save begins and fails when it is full."""

    def free_bytes(self, path: str) -> int | None:
        """Return how many bytes can still be written at `path`, whose parents may be absent; None if unknown.

        Quick: it is asked once for each save.
        """
        ...


@runtime_checkable
class KvStoreSpecs(Capability, Protocol):
    """A store that TensorStore can read.

    On any other, a restore refuses indexes that TensorStore compressed, and chunks with a codec that have no
    recorded checksum.
    """

    def kvstore_spec(self, directory: str) -> dict[str, Any]:
        """Return the TensorStore kvstore spec of the keys below `directory`."""
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
        """Return what a chunk or a pack of so many bytes begins at a multiple of."""
        if nbytes >= self.page_from_bytes:
            return self.page_bytes

        return self.line_bytes if nbytes >= self.page_bytes else 1


DEFAULT_PLACEMENT: Final = Placement()
"""For a store that has no preference."""


@runtime_checkable
class PreferredPlacement(Capability, Protocol):
    """A store that says how bytes should be placed; see `penstock.kernel.protocols.store_capabilities`."""

    @property
    def placement(self) -> Placement:
        """Its preferences. Does not block, and is always the same."""
        ...


@runtime_checkable
class Leftovers(Capability, Protocol):
    """A store that finds by itself what processes left that ended in the middle of a save or a deletion.

    On any other, that is found by its name.
    """

    def collect(
        self, path: str, older_than_s: float | None = None
    ) -> Mapping[str, Literal["removed", "published", "kept"]]:
        """Remove it, or publish what was whole, at a path and right below it.

        Args:
            path: Of a checkpoint, or of a directory of them.
            older_than_s: What says nothing of its process that can be asked, as on another machine, counts
                as left once it has not changed for so many seconds, even if its lease is longer.

        Returns:
            By path, what became of each; `kept` where somebody may be at work.
        """
        ...


@runtime_checkable
class OverNetwork(Capability, Protocol):
    """A store, or a file of one, whose bytes may be damaged on their way although they are stored well.

    What does not fit its checksum is read once more there before that is an error.
    """

    @property
    def over_network(self) -> Literal[True]:
        """Says that it is one."""
        ...


@runtime_checkable
class CountedRequests(Capability, Protocol):
    """A store that asks a server, and counts what it asks."""

    def request_figures(self) -> RequestFigures:
        """Return what was asked so far. Does not block."""
        ...


def requests_of(store: object, since: RequestFigures | None = None) -> RequestFigures | None:
    """Return the requests of a store, all or those after `since`; None if it asks no server."""
    found = store.request_figures() if isinstance(store, CountedRequests) else RequestFigures()
    return found - (since or RequestFigures()) if found.n_sent else None


@runtime_checkable
class Snapshot(Capability, Protocol):
    """A `Store` to read one checkpoint from, that knows most answers. It has the store's other capabilities.

    Of the checkpoint it answers as it was when it was listed; what it does not know it asks the store.
    """

    def reads(self) -> Sequence[Callable[[], None]]:
        """Return what reads documents before they are asked for. Blocking; may be called side by side."""
        ...

    def settle(self) -> Snapshot | None:
        """Compare what was read with the identity of the checkpoint. Blocking; called after all `reads`.

        Returns:
            None if all belongs to one checkpoint. Else another snapshot, to begin anew with.

        Raises:
            StorageError: With `errno.ENOENT` if the checkpoint is gone.
        """
        ...

    def identity_now(self) -> object:
        """Return the identity of the checkpoint now. Asks only if anything was asked after it was known."""
        ...

    def is_current(self) -> bool:
        """Ask whether the checkpoint has this identity. Blocking; for one that was made some time ago."""
        ...

    def told(self) -> bytes:
        """Return what it knows, once it is settled, for other processes. Blocking."""
        ...


@runtime_checkable
class Snapshots(Capability, Protocol):
    """A store that each question costs a request, and that learns much by one."""

    def snapshot(self, path: str) -> Snapshot | None:
        """List the checkpoint at `path`. Blocking.

        Returns:
            None if there is none right there, or if it is too large to be listed.
        """
        ...

    def told_snapshot(self, path: str, told: bytes) -> Snapshot | None:
        """Return what another process knows of the checkpoint at `path`. Blocking, and asks nothing.

        Whether it is still there, `Snapshot.is_current` says.

        Returns:
            None if it cannot be read.
        """
        ...


@runtime_checkable
class SingleWriter(Capability, Protocol):
    """A store that can be told that nobody else saves to the same paths, where it could not find out."""

    def relies_on_single_writer(self) -> bool:
        """True if it does rely on that. Does not block. Known once a save has begun."""
        ...


class Hold(Protocol):
    """A held directory. The hold also ends with its process."""

    def release(self) -> None:
        """Give up the hold. Idempotent; never fails."""
        ...


@runtime_checkable
class PlacedHold(Hold, Protocol):
    """A hold that knows where the directory lies that it is on."""

    def lies_at(self, path: str) -> bool:
        """True if it lies at `path`. Blocking."""
        ...


@runtime_checkable
class BuildHolds(Capability, Protocol):
    """A store whose directories can be held exclusively, so that only one save at a time builds there."""

    def hold(self, path: str) -> Hold:
        """Hold the directory at `path` exclusively. The hold stays with it when it is renamed.

        Raises:
            InUseError: If anybody holds it, in this process or another.
        """
        ...

    def make_held(self, path: str) -> Hold:
        """Create the directory at `path`, held exclusively from the first, and its missing parents, durably.

        Its own name need not be durable: what is built there is published under another one, which is. If it
        fails, nothing is left at `path`.

        Raises:
            InUseError: If something lies there already. If several create it at once, one succeeds.
        """
        ...


@runtime_checkable
class LeasedHold(Hold, Protocol):
    """A hold that ends when it is not renewed in time. To release it never fails."""

    def confirm(self) -> None:
        """Return if it is still held, which renews it. Blocking.

        Raises:
            ClaimLostError: If another process holds it now.
            StorageError: If the medium does not say.
        """
        ...


@runtime_checkable
class Leases(Capability, Protocol):
    """A store without locks, whose builds and holds end by themselves when they are not renewed in time.

    Whoever needs what was not renewed takes it over, and the old holder can publish and delete nothing more.
    `penstock.kernel.storage.lease_renewal` renews them while a program runs.
    """

    @property
    def lease_s(self) -> float:
        """After how many seconds without renewal they end."""
        ...

    def hold_root(self, path: str) -> LeasedHold:
        """Hold the sole right to write into a directory, under the name `path` in it.

        Raises:
            InUseError: If another one holds it.
        """
        ...

    def renew_leases(self) -> None:
        """Renew all builds and holds of this store object. A medium that does not answer is no failure."""
        ...


@runtime_checkable
class MarkedCheckpoints(Capability, Protocol):
    """A store in which a directory is a checkpoint once its mark lies in it, `commit_success.txt`.

    What has no mark is none, whatever lies in it. On any other store a directory gets its name when it is
    complete.
    """

    def marked_folders(self, path: str, among: Collection[str] | None = None) -> Sequence[str]:
        """Return the names of the directories with a mark that are right below `path`.

        Args:
            path: A directory; if nothing is there, the result is empty.
            among: Look at these names alone.
        """
        ...

    def is_unmarked(self, path: str) -> bool:
        """True if something lies at `path` that is no checkpoint, holds none, and that no save claims."""
        ...


@runtime_checkable
class ReadHolds(Capability, Protocol):
    """A store whose directories can be held by readers, so that nothing is deleted while it is read."""

    def hold_reading(self, path: str) -> Hold:
        """Hold the directory at `path`, shared with other readers; `BuildHolds.hold` fails meanwhile.

        Raises:
            InUseError: If it is held exclusively or is being replaced.
            StorageError: With `errno.ENOENT` if there is nothing.
        """
        ...


@runtime_checkable
class FolderListing(Capability, Protocol):
    """A store that tells directories from files without one call for each."""

    def list_folders(self, path: str) -> Sequence[str]:
        """Return the names of the directories in the directory at `path`."""
        ...


@runtime_checkable
class ManyFiles(Capability, Protocol):
    """A store that reads or measures many small files more cheaply than one by one."""

    def read_files(self, paths: Iterable[str]) -> Sequence[bytes | None]:
        """Return the content of each file; None where there is no file."""
        ...

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        """Return the length of each file in bytes; -1 for a directory, None where there is nothing."""
        ...


@runtime_checkable
class UntrustedFiles(Capability, Protocol):
    """A store whose files may not be what they seem: they may have holes, and be links to others."""

    def data_sizes(self, paths: Iterable[str]) -> Sequence[int]:
        """Return the bytes of each file that take room on the medium; 0 for what is no file."""
        ...

    def check_links(self, root: str, directory: str) -> None:
        """Refuse symbolic links below `directory` that lead out of `root`, unless the store allows them.

        Args:
            root: A checkpoint; may be a link itself.
            directory: The part of it to look at; `root` or a directory below it.

        Raises:
            LinkOutsideError: If there is one.
        """
        ...


def placement_of(store: Store) -> Placement:
    """Return what the store prefers, or the default."""
    return store.placement if isinstance(store, PreferredPlacement) else DEFAULT_PLACEMENT


def foreign_files(store: Store, path: str) -> ForeignFiles:
    """Return the store, if other libraries can write files at `path` and below.

    Raises:
        UnsupportedByStoreError: If the store's paths are not operating system paths.
    """
    if not isinstance(store, ForeignFiles):
        raise UnsupportedByStoreError("let a leaf handler write files at", path, store, ForeignFiles)

    return store
