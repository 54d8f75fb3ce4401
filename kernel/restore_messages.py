"""What travels between the stages of a restore; part of `messages`, where the whole flow is told."""

from __future__ import annotations

__all__ = (
    "DirectRead",
    "DriverRead",
    "HostBatch",
    "Located",
    "Only",
    "Order",
    "PartOf",
    "Read",
    "ReadBatch",
    "ReadLeaf",
    "RestoreRequest",
    "RestoredBatch",
    "RestoredTree",
    "ScatterRead",
    "StoredLeaf",
    "Target",
)

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.kernel.leaf_spec import KeyPath, LeafSpec, ParamInfo

if TYPE_CHECKING:
    from penstock.kernel.adapter import AdaptedHandler
    from penstock.kernel.protocols import Destination, LeafHandler, StoredCheckpoint
    from penstock.kernel.read_pack import HostPack, ReadPack
    from penstock.kernel.regulator import ByteLease
    from penstock.kernel.restore_options import RestoreOptions


Only: TypeAlias = str | Sequence[str] | Callable[[KeyPath], bool]
"""Which leaves are wanted: shell patterns over dotted names, or a function of the stored key path."""
Order: TypeAlias = Sequence[str] | Callable[[KeyPath], Any]
"""Which leaves come first: shell patterns over dotted names, or a function from a key path to its rank."""


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The first message of a restore."""

    path: str
    like: object = None
    has_like: bool = False  #: None is a tree, too
    options: RestoreOptions | None = None  #: how the result may depart from what is stored
    mmap: bool = False  #: whether plain leaves are to live in the page cache
    split: str | None = None  #: what separates the keys in names, where names are all that is stored
    item: str | None = None  #: of the checkpoint; by default the one that holds the tree
    only: Only | None = None  #: leaves that are wanted; all of them by default


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
    options: RestoreOptions | None = None
    mmap: bool = False


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
class PartOf:
    """Which part of which leaf a `ReadLeaf` is, if it is a part."""

    index: int  #: the leaf's place in the result's flatten order
    number: int  #: from 0
    count: int  #: of parts of that leaf

    @property
    def is_last(self) -> bool:
        """Whether it is the last in order; it may be read before others."""
        return self.number == self.count - 1


@dataclass(frozen=True, slots=True)
class ReadLeaf:
    """One leaf on its way in, or one part of a leaf that would take too much of the memory budget."""

    index: int  #: its place in the result's flatten order; of a part, a negative number of its own
    stored: StoredLeaf
    handler: LeafHandler | AdaptedHandler
    target: Target = field(default_factory=Target)
    reads: tuple[Read, ...] = ()
    part: PartOf | None = None  #: else it is the whole leaf

    @property
    def ends_leaf(self) -> bool:
        """Whether a leaf is to be counted with it: it is whole, or the last part."""
        return self.part is None or self.part.is_last

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
    pack: ReadPack | None = None  #: instead of leaves and reads
    scratch: ByteLease | None = None  #: on buffers that die once they are read

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum([read.nbytes for read in self.reads]) + (0 if self.pack is None else self.pack.nbytes)

    def release(self) -> None:
        """Give back every lease. Never blocks, and may be called again."""
        for _, lease in self.staged:
            lease.release()

        self.release_read()

    def release_read(self) -> None:
        """Give back the leases that end when the reads have been performed."""
        for lease in (self.in_flight, self.scratch):
            if lease is not None:
                lease.release()


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Leaves whose every byte is on the host."""

    leaves: tuple[ReadLeaf, ...]
    ready: tuple[tuple[int, object], ...] = ()  #: (leaf index, value) that a third party's handler read
    staged: tuple[ByteLease, ...] = ()
    packs: tuple[HostPack, ...] = ()

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
