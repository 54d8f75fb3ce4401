"""What travels between the stages of a restore; part of `messages`, where the whole flow is told."""

from __future__ import annotations

__all__ = (
    "HostBatch",
    "Located",
    "Making",
    "Only",
    "Order",
    "PartOf",
    "ReadBatch",
    "ReadLeaf",
    "RestorePlan",
    "RestoreRequest",
    "RestoredBatch",
    "RestoredTree",
)

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ReferenceType

from penstock.kernel.protocols.leaf import KeyPath, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Read, Target

if TYPE_CHECKING:
    from penstock.kernel.memory.byte_account import ByteLease
    from penstock.kernel.messages.packs import HostPack, ReadPack
    from penstock.kernel.messages.restore_options import Change, RestoreOptions
    from penstock.kernel.protocols.checkpoints import StoredCheckpoint
    from penstock.kernel.protocols.files_handler import FilesHandler
    from penstock.kernel.protocols.leaf_handlers import LeafHandler


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
class Located:
    """A checkpoint that was found and whose documents were read; no array byte has been."""

    checkpoint: StoredCheckpoint
    like: object
    has_like: bool
    options: RestoreOptions | None = None
    mmap: bool = False
    only: Only | None = None


@dataclass(frozen=True, slots=True)
class Making:
    """How one leaf of a result is made from values that were read for it."""

    index: int  #: of the leaf, in the result
    inputs: tuple[int, ...]  #: indices of the values; none of them is an index of the result
    make: Callable[[Sequence[Any]], object]
    """Blocking; takes the inputs in order. Returns a `TreeDifference` if what it made does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class RestorePlan:
    """What the planning stage decided about the result as a whole. Every later batch refers to it.

    A stage that makes a batch of its own passes on the `plan` of the batch it took. The last stages
    need it: they know from it which values must arrive, and what tree they become.
    """

    infos: Sequence[ParamInfo]  #: one for each leaf of the result, in flatten order
    unflatten: Callable[[Sequence[object]], object]  #: makes the tree of one value per info, in order
    directory: str = ""  #: what holds the stored tree: the checkpoint, or an item in it
    kept: Sequence[tuple[int, object]] = ()  #: (index, value) of leaves that stay as the target has them
    makings: Sequence[Making] = ()  #: leaves that functions make
    changes: tuple[Change, ...] = ()  #: how the result departs from what is stored, as it was asked for


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
    handler: LeafHandler
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
    handler: FilesHandler | None = None  #: that reads all of these leaves from files of its own
    plan: RestorePlan | None = None

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
    plan: RestorePlan | None = None

    def release(self) -> None:
        """Give back every lease. Never blocks, and may be called again."""
        for lease in self.staged:
            lease.release()


@dataclass(frozen=True, slots=True)
class RestoredBatch:
    """Finished values, by leaf index."""

    values: Sequence[tuple[int, object]]
    plan: RestorePlan | None = None


@dataclass(frozen=True, slots=True)
class RestoredTree:
    """The last message of a restore."""

    tree: object
    plan: RestorePlan | None = None
    references: Mapping[str, ReferenceType[Any]] = field(default_factory=dict["str", "ReferenceType[Any]"])
    """Values that can never change and are what is stored, by stored name."""
