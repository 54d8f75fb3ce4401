"""The interfaces: what plugs into the kernel, and what the kernel promises to what is plugged in.

Nothing of penstock is imported here but the messages. Whoever writes a store, a layout or a handler
needs this file and `messages.py`, and nothing else.
"""

from __future__ import annotations

__all__ = (
    "Adopting",
    "BufferHandler",
    "Coordinator",
    "DataFile",
    "Destination",
    "ForeignFuture",
    "Hold",
    "Layout",
    "LeafColumns",
    "LeafHandler",
    "PackedCheckpoint",
    "PackingHandler",
    "ReadableFile",
    "SigningHandler",
    "SnapshotHandler",
    "Store",
    "StoredCheckpoint",
    "TypeHandler",
    "Waitable",
)

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from penstock.kernel.errors import TreeDifference
from penstock.kernel.messages import (
    Document,
    KeyKind,
    KeyPath,
    Leaf,
    LeafSpec,
    ParamInfo,
    PiecePlan,
    Read,
    ReadLeaf,
    StoredLeaf,
    Target,
    Written,
    WrittenBatch,
)
from penstock.kernel.read_pack import HostPack, WholeChunks
from penstock.kernel.store_protocols import DataFile, Hold, ReadableFile, Store

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
    checkpoint directory, or that of an item in it; a handler may put files there, named after
    `infos[i].name`.
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
        """Called once per save and directory, after every future is done and before the commit."""
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


@runtime_checkable
class Adopting(Protocol):
    """What a `Destination` may add: it can live in memory that is filled already."""

    @property
    def nbytes(self) -> int: ...

    def adopt(self, memory: memoryview) -> None:
        """Be these bytes, read-only, instead of memory of its own. Before anybody looked at it."""
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
        """Plan how the leaf gets to the host, each piece that is copied of at most about `piece_bytes`.

        Together the pieces cover every chunk of `leaf.spec` once, chunk by chunk, in order of
        `start` within a chunk. A piece with `cost` 0 looks at memory that nobody will change; it may
        be larger, since `limit_bytes` cuts it.

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


@runtime_checkable
class PackingHandler(LeafHandler, Protocol):
    """What a `LeafHandler` may add, so that its small leaves are read and built many at a time."""

    def pack_details(self, specs: Sequence[LeafSpec], likes: Sequence[Any] | None) -> Sequence[Any]:
        """Decide for many leaves at once what `target` would.

        Args:
            specs: Of the leaves on disk, of any typestr.
            likes: What each is to be; None for a restore without a target.

        Returns:
            For each leaf the handler's own detail, if all of its bytes in C order are what
            `build_pack` needs; else None, and `target` will be asked.
        """
        ...

    def build_pack(self, pack: HostPack) -> Sequence[Any]:
        """Make the values, in order; none may keep the memory of `pack.data`. Blocking."""
        ...


@runtime_checkable
class PackedCheckpoint(Protocol):
    """What a `StoredCheckpoint` may add, so that many small leaves can be found at once."""

    def whole_chunks(self, numbers: Sequence[int]) -> WholeChunks:
        """Say where leaves lie that are one raw chunk each.

        Args:
            numbers: Places in `leaves`.
        """
        ...


@runtime_checkable
class LeafColumns(Protocol):
    """What the leaves of a `StoredCheckpoint` may offer beside being a sequence: the same in columns.

    Looking at columns costs a fraction of making an object for each leaf.
    """

    @property
    def keys(self) -> Sequence[KeyPath]: ...
    @property
    def kinds(self) -> Sequence[tuple[KeyKind, ...]]: ...
    @property
    def specs(self) -> Sequence[LeafSpec]: ...


@runtime_checkable
class BufferHandler(Protocol):
    """What a `LeafHandler` may add, so that its small leaves are gathered and not staged one by one."""

    def buffer(self, leaf: Leaf) -> Any:
        """Return an object whose buffer (PEP 688) is the one chunk of `leaf`, to be copied at once; or None.

        None sends the leaf through `pieces`, and so does whatever is raised while the bytes are copied.
        Blocking.
        """
        ...


@runtime_checkable
class SigningHandler(Protocol):
    """What a `LeafHandler` may add, so that a tree that is saved again need not be described again."""

    def signature(self, value: Any) -> object:
        """Return a value that is cheap to make and to compare: while it is equal, so is the `LeafSpec`.

        None if there is no such value. What `describe` would refuse for another reason than its
        signature (a deleted array) has none.
        """
        ...


@runtime_checkable
class SnapshotHandler(Protocol):
    """What a `LeafHandler` may add, so that the same object need not be written twice."""

    @property
    def immutable(self) -> bool:
        """Whether a value never changes: while it is the same object, its bytes are the same."""
        ...


class StoredCheckpoint(Protocol):
    """A checkpoint whose documents have been read."""

    @property
    def path(self) -> str: ...
    @property
    def directory(self) -> str:
        """What holds the tree: `path`, or an item in it. Data files are named from here."""
        ...

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
    @property
    def digests(self) -> Mapping[str, bytes]:
        """The digest of each leaf's bytes, by stored name, as far as they were recorded."""
        ...

    def parts(self, stored: StoredLeaf) -> Sequence[Written]:
        """Say where the bytes of a leaf lie, as whoever wrote them said.

        Returns:
            Parts that tile every chunk, as plain bytes with known checksums, in files named from
            `directory` (their `leaf` is 0); nothing if the leaf lies in any other way.
        """
        ...

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
        batches: Sequence[WrittenBatch],
        *,
        started_ns: int,
        custom_metadata: Mapping[str, Any] | None,
        digests: Mapping[str, bytes] | None = None,
    ) -> Iterable[Document]:
        """Make every document of a checkpoint, in the order in which they must become durable.

        Array bytes lie where `batches` say. The last document is the commit mark. The `digests`, by
        stored name, are kept with the checkpoint.
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
