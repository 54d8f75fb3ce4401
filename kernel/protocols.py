"""The interfaces: what plugs into the kernel, and what the kernel promises to what is plugged in.

Nothing of penstock is imported here but the messages. Whoever writes a store, a layout or a handler
needs this file and `messages.py`, and nothing else.
"""

from __future__ import annotations

__all__ = (
    "Coordinator",
    "DataFile",
    "Destination",
    "ForeignFuture",
    "Hold",
    "Layout",
    "LeafHandler",
    "ReadableFile",
    "Store",
    "StoredCheckpoint",
    "TypeHandler",
    "Waitable",
)

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from penstock.kernel.errors import TreeDifference
from penstock.kernel.messages import (
    Document,
    Leaf,
    LeafSpec,
    ParamInfo,
    PiecePlan,
    Read,
    ReadLeaf,
    StoredLeaf,
    Target,
    Written,
)

T_co = TypeVar("T_co", covariant=True)


class ForeignFuture(Protocol[T_co]):
    """A future that other threads complete: TensorStore's, or `concurrent.futures.Future`."""

    def add_done_callback(self, callback: Callable[[Any], None], /) -> object: ...
    def cancel(self) -> object: ...
    def result(self) -> T_co: ...


class Waitable(Protocol):
    """All that is asked of the futures a `TypeHandler` returns: a blocking `result`."""

    def result(self, timeout: float | None = None) -> object: ...


@runtime_checkable
class TypeHandler(Protocol):
    """The batch protocol of the field: what a third party implements for a leaf type of its own.

    `serialize` returns once the values are copied (they may change afterwards) with one future for
    each piece of background work; `deserialize` returns the values. `infos[i].directory` is the
    checkpoint directory; a handler may put files there, named after `infos[i].name`.
    """

    def typestr(self) -> str: ...

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Waitable]: ...

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[Any] | None = None
    ) -> Sequence[Any]: ...

    async def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]: ...

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Bytes that saving and that restoring each value holds on the host."""
        ...

    def finalize(self, directory: str) -> None:
        """Called once per save, after every future is done and before the commit."""
        ...


class Destination(Protocol):
    """A host buffer for one rectangular part of a global array, allocated when first looked at."""

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) along each axis of the global array."""
        ...

    @property
    def nbytes(self) -> int: ...

    def view(self) -> memoryview:
        """The buffer: writable, contiguous, C order, as bytes. Thread-safe."""
        ...


class LeafHandler(Protocol):
    """The streaming protocol: a leaf to its pieces on the host, and buffers back to a value.

    One instance serves many saves and restores at once, so it holds no state of theirs.
    """

    @property
    def typestr(self) -> str:
        """The type name that `_METADATA` records."""
        ...

    def describe(self, value: Any, info: ParamInfo) -> LeafSpec:
        """Say what would be stored of `value`. Reads no array bytes, writes nothing.

        Raises:
            InvalidLeafError: If the value cannot be stored; the message says why.
            DeletedLeafError: If the array is deleted or donated.
        """
        ...

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        """Plan how the leaf gets to the host, each piece of at most about `piece_bytes`.

        Together the pieces cover every chunk of `leaf.spec` once, chunk by chunk, in order of
        `start` within a chunk. A piece with `cost` 0 looks at memory that nobody will change.

        Raises:
            DeletedLeafError: From here or from `take`, if the array is gone.
        """
        ...

    def target(self, stored: StoredLeaf, like: Any, has_like: bool) -> Target | TreeDifference:
        """Decide what to read so that `build` can make what `like` asks for, or say what differs.

        Args:
            stored: The leaf on disk; of any typestr.
            like: A concrete value, an abstract one, or a type; ignored unless `has_like`.
            has_like: False for a restore without a target: the saved type, where it can be had here.
        """
        ...

    def build(self, leaves: Sequence[ReadLeaf]) -> Sequence[Any]:
        """Make the values from the filled regions of each leaf's target. Blocking.

        Returns:
            One value per leaf, in order.
        """
        ...


class StoredCheckpoint(Protocol):
    """A checkpoint whose documents have been read."""

    @property
    def path(self) -> str: ...
    @property
    def leaves(self) -> Sequence[StoredLeaf]:
        """Every leaf and empty marker, in stored order."""
        ...

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        """The caller's own, of the checkpoint or step."""
        ...

    @property
    def tree_custom_metadata(self) -> object:
        """The caller's own, kept with the tree; None if there is none."""
        ...

    @property
    def root_custom_metadata(self) -> Mapping[str, Any] | None:
        """The caller's own, of the directory of steps that was asked for."""
        ...

    @property
    def committed_at_ns(self) -> int | None: ...

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads that fill `region`, each of at most about `piece_bytes`. Opens nothing.

        Args:
            index: What to put into `Read.leaf`.
            stored: One of `leaves`.
            region: Where the bytes go.
            piece_bytes: Upper bound for one read, unless a codec makes a chunk indivisible.

        Raises:
            CorruptCheckpointError: If chunks that were recorded as written are missing.
        """
        ...


class Layout(Protocol):
    """An on-disk format: names and documents, no array bytes. Every method is blocking or pure."""

    def temporary_name(self, path: str) -> str:
        """The name under which the checkpoint `path` is built before it is published."""
        ...

    def data_file(self) -> str:
        """A fresh name for a data file, relative to the checkpoint directory."""
        ...

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Refuse leaves that could not be stored beside each other, before anything is written.

        Raises:
            SpecError: If two have one stored name, or one has a name that cannot be stored.
        """
        ...

    def documents(
        self,
        leaves: Sequence[Leaf],
        written: Sequence[Written],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
    ) -> Iterable[Document]:
        """Make every document of a checkpoint, in the order in which they must become durable.

        Array bytes lie where `written` says. The last document is the commit mark.
        """
        ...

    def recognises(self, store: Store, path: str) -> bool:
        """Whether the directory at `path` is of this layout, or empty: it may be overwritten then."""
        ...

    def open(self, store: Store, path: str, item: str | None = None) -> StoredCheckpoint:
        """Find the checkpoint at `path`, or the latest of several there, and read its documents.

        Args:
            store: Where it lies.
            path: Absolute.
            item: Which of its items is meant; by default the one that holds the tree.

        Raises:
            NotACheckpointError: If nothing of this layout lies there, or no such item.
            IncompleteCheckpointError: If a save was interrupted there.
            CorruptCheckpointError: If a document is damaged; the message names it.
        """
        ...


class DataFile(Protocol):
    """A file being written at chosen offsets, by several threads at once."""

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all buffers one after another, beginning at `offset`; never short."""
        ...

    def sync(self) -> None:
        """Make every byte durable. If it fails, the file is lost: never retried."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class ReadableFile(Protocol):
    """A file being read at chosen offsets, by several threads at once."""

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


class Coordinator(Protocol):
    """What the processes of one job agree through. Every wait has a deadline."""

    @property
    def process_index(self) -> int: ...
    @property
    def process_count(self) -> int: ...
    @property
    def is_primary(self) -> bool: ...
    async def barrier(self, name: str, timeout_s: float) -> None:
        """Wait until every process is here."""
        ...
