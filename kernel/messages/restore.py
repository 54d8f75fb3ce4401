"""What travels between the stages of a restore. `penstock.kernel.messages` tells the whole flow."""

from __future__ import annotations

__all__ = (
    "HostBatch",
    "HostPart",
    "Located",
    "Making",
    "Only",
    "Order",
    "ReadBatch",
    "RestorePlan",
    "RestoreRequest",
    "RestoredBatch",
    "RestoredTree",
)

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ReferenceType

from penstock.kernel.messages.packs import HostPack, ReadLeaf, ReadPack
from penstock.kernel.protocols.leaf import KeyPath, LeafSpec, ParamInfo

if TYPE_CHECKING:
    from penstock.kernel.memory.byte_account import ByteLease
    from penstock.kernel.messages.restore_options import Change, RestoreOptions
    from penstock.kernel.protocols.checkpoints import StoredCheckpoint
    from penstock.kernel.protocols.files_handler import FilesHandler
    from penstock.kernel.protocols.reads import Read


Only: TypeAlias = str | Sequence[str] | Callable[[KeyPath], bool]
"""Which leaves are wanted: shell patterns over dotted names, or a function of the stored key path."""
Order: TypeAlias = Sequence[str] | Callable[[KeyPath], Any]
"""Which leaves come first: shell patterns over dotted names, or a function that ranks key paths."""


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The first message of a restore."""

    path: str
    like: object = None
    has_like: bool = False  #: whether `like` counts; None is a tree, too
    options: RestoreOptions | None = None  #: how the result may depart from what is stored
    mmap: bool = False  #: whether plain leaves live in the page cache
    split: str | None = None  #: what separates the keys in a name, in a format that stores only names
    item: str | None = None  #: which item of the checkpoint; by default the one that holds the tree
    only: Only | None = None  #: which leaves are wanted; None for all
    verify: bool | None = None  #: whether checksums are compared; None: of all but what is mapped


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint whose documents have been read, and what to restore from it. No array byte is read yet."""

    checkpoint: StoredCheckpoint
    like: object
    has_like: bool
    options: RestoreOptions | None = None
    mmap: bool = False
    only: Only | None = None
    verify: bool = False  #: whether what is mapped is compared with its checksums


@dataclass(frozen=True, slots=True)
class Making:
    """How one leaf of the result is computed from values that were read for it."""

    index: int  #: of the leaf, in the result
    inputs: tuple[int, ...]  #: indices of the values; none of them is an index of the result
    make: Callable[[Sequence[Any]], object]
    """Blocking; takes the inputs in order. Returns a `TreeDifference` if what it made does not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class RestorePlan:
    """The planning stage's decisions about the whole result. Every later batch refers to them.

    A stage that creates batches passes on the `plan` of the batch it took. The last stages learn from it
    which values must arrive and what tree they form.
    """

    infos: Sequence[ParamInfo]  #: one for each leaf of the result, in flatten order
    unflatten: Callable[[Sequence[object]], object]  #: makes the tree of one value per info, in order
    directory: str = ""  #: what holds the stored tree: the checkpoint, or an item in it
    kept: Sequence[tuple[int, object]] = ()  #: (index, value) of leaves that keep the target's value
    makings: Sequence[Making] = ()  #: leaves that functions make
    changes: tuple[Change, ...] = ()  #: how the result departs from what is stored, as it was asked for


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Reads that may be performed now, with the leases on their bytes.

    A stage that drops a batch instead of passing it on releases it.
    """

    leaves: tuple[ReadLeaf, ...]  #: those that the reads belong to; a large leaf comes with each of its reads
    reads: tuple[Read, ...]
    staged: tuple[tuple[int, ByteLease], ...] = ()  #: (leaf index, lease on its staging bytes)
    in_flight: ByteLease | None = None
    pack: ReadPack | None = None  #: instead of leaves and reads
    scratch: ByteLease | None = None  #: on buffers that die once they are read
    handler: FilesHandler | None = None  #: reads all of these leaves itself, from files of its own
    plan: RestorePlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum([read.nbytes for read in self.reads]) + (0 if self.pack is None else self.pack.nbytes)

    def release(self) -> None:
        """Give back every lease. Never blocks; may be called again."""
        for _, lease in self.staged:
            lease.release()

        self.release_read()

    def release_read(self) -> None:
        """Give back the leases that end when the reads have been performed."""
        for lease in (self.in_flight, self.scratch):
            if lease is not None:
                lease.release()


@dataclass(frozen=True, slots=True)
class HostPart:
    """One rectangular part of a stored array, on the host."""

    info: ParamInfo  #: where the leaf stands
    spec: LeafSpec  #: of the leaf as it is stored
    bounds: tuple[tuple[int, int], ...]  #: (start, stop) of the part along each axis of the whole array
    data: memoryview
    """Its elements as bytes, in C order. A stage may write other bytes of the same length into it; it is
    read-only only where the file itself is the memory, under `mmap`."""

    @property
    def key_path(self) -> str:
        """The leaf's key path, for messages."""
        return self.info.key_path


@dataclass(frozen=True, slots=True)
class HostBatch:
    """Leaves whose bytes are all on the host."""

    leaves: tuple[ReadLeaf, ...]
    ready: tuple[tuple[int, object], ...] = ()  #: (leaf index, value), read by a handler itself
    staged: tuple[ByteLease, ...] = ()
    packs: tuple[HostPack, ...] = ()
    plan: RestorePlan | None = None

    def release(self) -> None:
        """Give back every lease. Never blocks; may be called again."""
        for lease in self.staged:
            lease.release()

    def parts(self) -> Iterator[HostPart]:
        """Yield all bytes that were read, leaf by leaf, from packs and single leaves alike. Blocking.

        Leaves without array bytes, and those of `ready`, have none.
        """
        for leaf in self.leaves:
            for region in leaf.target.regions:
                yield HostPart(leaf.info, leaf.stored.spec, region.bounds, region.view())

        for host in self.packs:
            pack = host.pack
            for index, spec, start, nbytes in zip(
                pack.indices, pack.specs, host.starts, pack.sizes, strict=True
            ):
                bounds = tuple([(0, size) for size in spec.shape or ()])
                yield HostPart(pack.info(index), spec, bounds, host.data[start : start + nbytes])


@dataclass(frozen=True, slots=True)
class RestoredBatch:
    """Finished values, by leaf index."""

    values: Sequence[tuple[int, object]]
    plan: RestorePlan | None = None


@dataclass(frozen=True, slots=True)
class RestoredTree:
    """The last message of a restore."""

    tree: object  #: None where the values were handed over one by one
    plan: RestorePlan | None = None
    references: Mapping[str, ReferenceType[Any]] = field(default_factory=dict["str", "ReferenceType[Any]"])
    """Immutable values that equal what is stored, by stored name."""
