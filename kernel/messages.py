"""What travels between the stages. Read this file and you know the whole system.

Saving:     tree ─ LeafBatch[Leaf] ─ StagedBatch ─ WrittenBatch ─ Committed ─ SaveReport
Restoring:  RestoreRequest ─ Located ─ LeafBatch[ReadLeaf] ─ ReadBatch ─ HostBatch ─ RestoredBatch
            ─ RestoredTree

The unit is the batch: a hop between two stages costs more than a small leaf does, so small leaves
travel together and only a large one travels alone, cut into pieces.
"""

from __future__ import annotations

__all__ = (
    "Batchable",
    "Committed",
    "DirectRead",
    "Document",
    "DriverRead",
    "HostBatch",
    "KeyKind",
    "KeyPath",
    "Leaf",
    "LeafBatch",
    "LeafSpec",
    "Located",
    "ParamInfo",
    "Pending",
    "Piece",
    "PiecePlan",
    "Read",
    "ReadBatch",
    "ReadLeaf",
    "RestoreRequest",
    "RestoredBatch",
    "RestoredTree",
    "SaveReport",
    "ScatterRead",
    "StagedBatch",
    "StoredLeaf",
    "Target",
    "TreeToSave",
    "Written",
    "WrittenBatch",
)

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar, final

from penstock.kernel.leaf_spec import KeyKind, KeyPath, LeafSpec, ParamInfo

if TYPE_CHECKING:
    from penstock.kernel.adapter import AdaptedHandler
    from penstock.kernel.meters import StageStatistics
    from penstock.kernel.protocols import Destination, LeafHandler, StoredCheckpoint
    from penstock.kernel.regulator import ByteLease

# Saving


@final
class TreeToSave:
    """The first message of a save: the caller's tree, until it is taken.

    Taking it lets go of it: a background save must not keep arrays alive that the caller dropped.
    """

    __slots__ = ("_tree",)

    def __init__(self, tree: object) -> None:
        self._tree: list[object] = [tree]

    def take(self) -> object:
        """Return the tree and forget it. To be called once."""
        return self._tree.pop()


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf on its way out. Holding it holds the value, which for a jax.Array is a snapshot."""

    index: int  #: its place in flatten order
    info: ParamInfo
    value: object
    spec: LeafSpec
    handler: LeafHandler | AdaptedHandler

    @property
    def nbytes(self) -> int:
        """Array bytes that are stored of it."""
        return self.spec.nbytes

    def without_value(self) -> Leaf:
        """Return the leaf without its value, so that a staged leaf does not keep an array alive."""
        return Leaf(self.index, self.info, None, self.spec, self.handler)


class Batchable(Protocol):
    """What can be prioritised: it knows where it stands and what it weighs."""

    @property
    def info(self) -> ParamInfo: ...
    @property
    def nbytes(self) -> int: ...


L = TypeVar("L", bound=Batchable)


@dataclass(frozen=True, slots=True)
class LeafBatch(Generic[L]):
    """Leaves that travel together: `Leaf`s of a save or `ReadLeaf`s of a restore."""

    leaves: tuple[L, ...]
    prioritised: bool = False


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """How to get one piece to the host; made by a handler, carried out by `device_to_host`."""

    chunk: tuple[int, ...]  #: grid index of the chunk that the piece belongs to
    start: int  #: offset of the piece in its chunk, bytes
    nbytes: int
    cost: int  #: host bytes that `take` allocates: 0 if it only looks at memory that exists
    take: Callable[[], memoryview]  #: blocking; returns `nbytes` contiguous bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous byte range of one chunk, on the host and safe from the caller's next step."""

    leaf: Leaf
    chunk: tuple[int, ...]
    start: int  #: offset in the chunk, bytes
    data: memoryview  #: bytes, one-dimensional and contiguous
    cost: int = 0  #: bytes leased for it

    @property
    def nbytes(self) -> int:
        """Length of the piece."""
        return len(self.data)

    def cut(self, nbytes: int) -> Iterator[Piece]:
        """Yield the same bytes in pieces of at most `nbytes`; the last one carries the cost."""
        for at in range(0, len(self.data), nbytes):
            cost = self.cost if at + nbytes >= len(self.data) else 0
            yield replace(self, start=self.start + at, data=self.data[at : at + nbytes], cost=cost)


@dataclass(frozen=True, slots=True)
class Pending:
    """A leaf that its own handler is writing, and how to wait for that."""

    leaf: Leaf
    wait: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Pieces on the host, with the leases on their bytes.

    Whoever drops a batch instead of passing it on releases it.
    """

    leaves: tuple[Leaf, ...] = ()  #: those whose last piece is in this batch, or that have none
    pieces: tuple[Piece, ...] = ()
    pending: tuple[Pending, ...] = ()
    staged: ByteLease | None = None  #: on the bytes copied to the host
    in_flight: ByteLease | None = None  #: on the bytes on their way to the store

    @property
    def nbytes(self) -> int:
        """Bytes of all its pieces."""
        return sum(len(piece.data) for piece in self.pieces)

    def release(self) -> None:
        """Give back both leases. Never blocks, and may be called again."""
        for lease in (self.staged, self.in_flight):
            if lease is not None:
                lease.release()


@dataclass(frozen=True, slots=True)
class Written:
    """Where a piece came to lie."""

    leaf: int  #: index of the leaf
    chunk: tuple[int, ...]
    start: int  #: offset in the chunk, bytes
    file: str  #: relative to the checkpoint directory
    offset: int  #: of the piece in that file, bytes; the chunk begins at `offset - start`
    nbytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """What one batch of pieces became."""

    leaves: tuple[Leaf, ...]
    written: tuple[Written, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A small file of a checkpoint."""

    path: str  #: relative to the checkpoint directory
    data: bytes


@dataclass(frozen=True, slots=True)
class Committed:
    """Everything is on the medium, under a temporary name."""

    n_leaves: int
    nbytes: int  #: array bytes
    n_files: int


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a finished save was. The last message of a save, completed by the kernel."""

    path: str
    n_leaves: int
    nbytes: int  #: array bytes written
    staged_s: float = math.nan  #: from the call to STAGED
    durable_s: float = math.nan  #: from the call to DURABLE
    peak_leased_bytes: int = 0  #: of the shared budget, over its life so far
    stages: tuple[StageStatistics, ...] = field(default=(), repr=False)


# Restoring


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The first message of a restore."""

    path: str
    like: object = None
    has_like: bool = False  #: None is a tree, too
    item: str | None = None  #: of the checkpoint; by default the one that holds the tree


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """One leaf found on disk."""

    info: ParamInfo
    spec: LeafSpec
    detail: object = None  #: the layout's own, handed back to it when the leaf is read


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint that was found and whose documents were read; no array byte has been."""

    checkpoint: StoredCheckpoint
    like: object
    has_like: bool


@dataclass(frozen=True, slots=True)
class Target:
    """What a handler wants read for one leaf."""

    regions: tuple[Destination, ...] = ()  #: distinct parts of the global array; together all that is needed
    staging_bytes: int = 0  #: host bytes that die once the value is built (0 if the value keeps them)
    detail: object = None  #: the handler's own, for `build`


@dataclass(frozen=True, slots=True)
class DirectRead:
    """A range of a file that goes, as it is, to one place in the destination."""

    leaf: int
    file: str  #: absolute
    offset: int
    nbytes: int
    region: Destination
    start: int  #: offset in the region's bytes
    crc32c: int | None = None  #: of these bytes as they were written, if that is known

    def into(self) -> memoryview:
        """Where the bytes go; allocates the region on first use."""
        return self.region.view()[self.start : self.start + self.nbytes]


@dataclass(frozen=True, slots=True)
class ScatterRead:
    """A range of a file that is spread over a destination (another sharding than the stored one)."""

    leaf: int
    file: str  #: absolute
    offset: int
    nbytes: int
    scatter: Callable[[memoryview], None]  #: blocking; copies out of the buffer it is given
    crc32c: int | None = None  #: of these bytes as they were written, if that is known


@dataclass(frozen=True, slots=True)
class DriverRead:
    """A read that somebody else's driver performs (TensorStore for chunks with a codec)."""

    leaf: int
    nbytes: int
    perform: Callable[[], Awaitable[None]]  #: returns when the destination is filled


Read: TypeAlias = DirectRead | ScatterRead | DriverRead


@dataclass(frozen=True, slots=True)
class ReadLeaf:
    """One leaf on its way in."""

    index: int  #: its place in the result's flatten order
    stored: StoredLeaf
    handler: LeafHandler | AdaptedHandler
    target: Target = field(default_factory=Target)
    reads: tuple[Read, ...] = ()

    @property
    def info(self) -> ParamInfo:
        """Where the leaf stands."""
        return self.stored.info

    @property
    def nbytes(self) -> int:
        """Bytes to be read for it."""
        return sum(read.nbytes for read in self.reads)


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Reads admitted to the store, with the leases on their bytes.

    Whoever drops a batch instead of passing it on releases it.
    """

    leaves: tuple[ReadLeaf, ...]  #: those that the reads belong to; seen again with each part of a large leaf
    reads: tuple[Read, ...]
    staged: tuple[tuple[int, ByteLease], ...] = ()  #: (leaf index, lease on its staging bytes)
    in_flight: ByteLease | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum(read.nbytes for read in self.reads)

    def release(self) -> None:
        """Give back every lease. Never blocks, and may be called again."""
        for _, lease in self.staged:
            lease.release()

        if self.in_flight is not None:
            self.in_flight.release()


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Leaves whose every byte is on the host."""

    leaves: tuple[ReadLeaf, ...]
    ready: tuple[tuple[int, object], ...] = ()  #: (leaf index, value) that a third party's handler read
    staged: tuple[ByteLease, ...] = ()

    def release(self) -> None:
        """Give back every lease. Never blocks, and may be called again."""
        for lease in self.staged:
            lease.release()


@dataclass(frozen=True, slots=True)
class RestoredBatch:
    """Finished values, by leaf index."""

    values: Sequence[tuple[int, object]]


@dataclass(frozen=True, slots=True)
class RestoredTree:
    """The last message of a restore."""

    tree: object
