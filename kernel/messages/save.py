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
    "Leaf",
    "LeafBatch",
    "Pack",
    "Pending",
    "Piece",
    "SaveReport",
    "StagedBatch",
    "TreeToSave",
    "WrittenBatch",
    "WrittenPack",
)

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, final

from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.written import Written

if TYPE_CHECKING:
    from penstock.kernel.memory.byte_account import ByteLease
    from penstock.kernel.messages.statistics import StageStatistics
    from penstock.kernel.protocols.files_handler import FilesHandler
    from penstock.kernel.protocols.leaf_handlers import LeafHandler

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
    handler: LeafHandler
    staged: Leaf | None = field(default=None, compare=False, repr=False)
    """The same leaf without its value, if it is known from an earlier save of the same tree."""

    @property
    def nbytes(self) -> int:
        """Array bytes that are stored of it."""
        return self.spec.nbytes

    def without_value(self) -> Leaf:
        """Return the leaf without its value, so that a staged leaf does not keep an array alive."""
        if self.staged is not None and self.staged.spec is self.spec:  # `replace` may have changed the spec
            return self.staged

        return Leaf(self.index, self.info, None, self.spec, self.handler)


class Batchable(Protocol):
    """What travels in a `LeafBatch`: it knows where it stands, who handles it and what it weighs."""

    @property
    def info(self) -> ParamInfo: ...
    @property
    def handler(self) -> LeafHandler: ...
    @property
    def nbytes(self) -> int: ...


L = TypeVar("L", bound=Batchable)


@dataclass(frozen=True, slots=True)
class LeafBatch(Generic[L]):
    """Leaves that travel together: `Leaf`s of a save or `ReadLeaf`s of a restore."""

    leaves: Sequence[L]  #: of a restore, perhaps a `ReadPack`
    prioritised: bool = False
    plan: Any = None  #: of a restore, its `RestorePlan`
    handler: FilesHandler | None = None  #: if these are all leaves of a handler with files of its own


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous byte range of one chunk, on the host and safe from the caller's next step."""

    leaf: Leaf
    chunk: tuple[int, ...]
    start: int  #: offset in the chunk, bytes
    data: memoryview  #: bytes, one-dimensional and contiguous
    cost: int = 0  #: bytes leased for it
    coded: int | None = None  #: if the chunk is encoded: how many bytes all of it became, which `start` is in

    @property
    def nbytes(self) -> int:
        """Length of the piece."""
        return len(self.data)

    @property
    def chunk_nbytes(self) -> int:
        """Stored bytes of the whole chunk that it is of."""
        return self.leaf.spec.chunk_nbytes if self.coded is None else self.coded

    def cut(self, nbytes: int) -> Iterator[Piece]:
        """Yield the same bytes in pieces of at most `nbytes`; the last one carries the cost."""
        for at in range(0, len(self.data), nbytes):
            cost = self.cost if at + nbytes >= len(self.data) else 0
            yield replace(self, start=self.start + at, data=self.data[at : at + nbytes], cost=cost)


@dataclass(frozen=True, slots=True)
class Pack:
    """Small leaves of one chunk each, their bytes one after the other in one buffer.

    What costs a small leaf most is being an object of its own in every message, so thousands of them
    travel, are written and are counted as a few packs.
    """

    leaves: tuple[Leaf, ...]  #: without values
    data: memoryview  #: bytes, one-dimensional and contiguous; a copy, so it costs its length

    @property
    def nbytes(self) -> int:
        """Length of the pack."""
        return len(self.data)

    @property
    def cost(self) -> int:
        """Bytes leased for it."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Pending:
    """Leaves that their own handler is writing, and how to wait for that."""

    leaves: tuple[Leaf, ...]  #: without values
    handler: FilesHandler
    folder: str  #: where it writes them, relative to the checkpoint directory
    wait: Callable[[], Awaitable[None]]  #: may be cancelled, and called again; the writing goes on


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
    packs: tuple[Pack, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all its pieces and packs."""
        return sum([len(piece.data) for piece in self.pieces]) + sum([len(pack.data) for pack in self.packs])

    def release(self) -> None:
        """Give back both leases. Never blocks, and may be called again."""
        for lease in (self.staged, self.in_flight):
            if lease is not None:
                lease.release()


@dataclass(frozen=True, slots=True)
class WrittenPack:
    """Where a pack came to lie."""

    leaves: tuple[Leaf, ...]
    file: str  #: relative to the checkpoint directory
    offset: int  #: of the first leaf in that file, bytes; the others follow without a gap
    nbytes: int
    crc32cs: tuple[int, ...]  #: one for each leaf

    def parts(self) -> Iterator[Written]:
        """Yield where each leaf lies."""
        offset = self.offset
        for leaf, crc32c in zip(self.leaves, self.crc32cs, strict=True):
            spec = leaf.spec
            yield Written(leaf.index, (0,) * len(spec.chunk_shape), 0, self.file, offset, spec.nbytes, crc32c)
            offset += spec.nbytes


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """What one batch of pieces and packs became."""

    leaves: tuple[Leaf, ...]
    written: tuple[Written, ...] = ()
    packs: tuple[WrittenPack, ...] = ()
    handled: tuple[Pending, ...] = ()  #: what handlers wrote into files of their own

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum([part.nbytes for part in self.written]) + sum([pack.nbytes for pack in self.packs])

    def parts(self) -> Iterator[Written]:
        """Yield where everything lies, piece by piece."""
        yield from self.written
        for pack in self.packs:
            yield from pack.parts()


@dataclass(frozen=True, slots=True)
class Committed:
    """Everything is on the medium, under a temporary name."""

    n_leaves: int
    nbytes: int  #: array bytes written
    n_files: int
    nbytes_kept: int = 0  #: array bytes shared with the base


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a finished save was. The last message of a save, completed by the kernel."""

    path: str
    n_leaves: int
    nbytes: int  #: array bytes written
    nbytes_kept: int = 0  #: array bytes that were not written, for the base holds them
    staged_s: float = math.nan  #: from the call to STAGED
    durable_s: float = math.nan  #: from the call to DURABLE
    peak_leased_bytes: int = 0  #: of the shared budget, over its life so far
    stages: tuple[StageStatistics, ...] = field(default=(), repr=False)
