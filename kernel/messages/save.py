"""The messages between the stages of a save. `penstock.kernel.messages` describes the whole flow."""

from __future__ import annotations

__all__ = (
    "Committed",
    "Extents",
    "FixedCourse",
    "Leaf",
    "LeafBatch",
    "Leaves",
    "Pending",
    "Piece",
    "Published",
    "References",
    "SavePlan",
    "StagedBatch",
    "TreeToSave",
    "WrittenBatch",
    "in_columns",
)

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from operator import is_
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final, overload
from weakref import ReferenceType

from penstock.kernel.concurrency.brief_steps import as_slice, cuts
from penstock.kernel.errors import ChangedLeafError
from penstock.kernel.messages.changed_specs import LeafChange, SpecChange, place_of, resolved_spec
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.written import Document, Written, WrittenTable

if TYPE_CHECKING:
    from penstock.kernel.memory.byte_account import ByteLease
    from penstock.kernel.messages.changed_specs import CodecChoice
    from penstock.kernel.messages.joint_plan import ArrangedPart, JointPlan
    from penstock.kernel.protocols.leaf_handlers import Background, FilesHandler, LeafHandler
    from penstock.kernel.protocols.written import ByIndex


_NOTHING_WRITTEN: Final = WrittenTable.of((), ())

References: TypeAlias = Mapping[str, "ReferenceType[Any]"]
"""Stored name -> the object that was saved or restored under it, if it can never change."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Leaves(Sequence[Leaf]):
    """Leaves in columns of one length. Immutable, but for `take`.

    To a stage it is a sequence of `Leaf`s like any other. They are made on access, and the stage may pass
    them on instead of the columns.
    """

    indices: Sequence[int]  #: places in flatten order
    specs: Sequence[LeafSpec]
    values: list[object] | None  #: None once the leaves are staged
    infos: ByIndex[ParamInfo]  #: where leaves stand, these and perhaps others, by index
    by_index: ByIndex[LeafHandler]  #: the handlers of the same leaves, by index
    are_described: bool = True
    """Whether values and specs are as the first stage described them. They are not known to be where a stage
    passed on single leaves: then they are compared before they are staged."""

    @classmethod
    def of(cls, leaves: Iterable[Leaf]) -> Leaves:
        """Put leaves into columns."""
        rows = list(leaves)
        return cls(
            [leaf.index for leaf in rows],
            [leaf.spec for leaf in rows],
            [leaf.value for leaf in rows],
            {leaf.index: leaf.info for leaf in rows},
            {leaf.index: leaf.handler for leaf in rows},
            are_described=False,
        )

    @property
    def sizes(self) -> list[int]:
        """Array bytes that are stored of each."""
        return [spec.nbytes for spec in self.specs]

    @property
    def chunk_sizes(self) -> list[int]:
        """Stored bytes of each chunk, leaf by leaf, for leaves without a codec."""
        specs = {id(spec): spec for spec in self.specs}
        sizes = {number: [spec.chunk_nbytes] * spec.n_chunks for number, spec in specs.items()}
        return list(chain.from_iterable([sizes[id(spec)] for spec in self.specs]))

    @property
    def handlers(self) -> list[LeafHandler]:
        """The handler of each."""
        return list(map(self.by_index.__getitem__, self.indices))

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, number: int, /) -> Leaf: ...
    @overload
    def __getitem__(self, number: slice, /) -> Leaves: ...
    def __getitem__(self, number: int | slice, /) -> Leaf | Leaves:
        if isinstance(number, slice):
            values = None if self.values is None else self.values[number]
            return replace(self, indices=self.indices[number], specs=self.specs[number], values=values)

        index = self.indices[number]
        value = None if self.values is None else self.values[number]
        return Leaf(index, self.infos[index], value, self.specs[number], self.by_index[index])

    def __iter__(self) -> Iterator[Leaf]:
        return map(self.__getitem__, range(len(self)))

    def part(self, numbers: Sequence[int]) -> Leaves:
        """Return some leaves, by number. A range in order shares the columns."""
        neighbours = as_slice(numbers)
        if neighbours is not None:
            return self[neighbours]

        return replace(
            self,
            indices=[self.indices[at] for at in numbers],
            specs=[self.specs[at] for at in numbers],
            values=None if self.values is None else [self.values[at] for at in numbers],
        )

    def take(self, start: int, stop: int) -> Leaves:
        """Return some leaves, and drop their values here."""
        taken = self[start:stop]
        if self.values is not None:
            self.values[start:stop] = repeat(None, len(taken))

        return taken

    def without_values(self) -> Leaves:
        """Return the same leaves without their values."""
        return replace(self, values=None)


def in_columns(leaves: Sequence[Leaf]) -> Leaves:
    """Return the leaves as columns; most are that already."""
    return leaves if isinstance(leaves, Leaves) else Leaves.of(leaves)


@dataclass(frozen=True, slots=True)
class LeafBatch:
    """Leaves of a save that travel together."""

    leaves: Sequence[Leaf]  #: mostly in columns: `Leaves`
    prioritised: bool = False
    plan: SavePlan | None = field(default=None, compare=False, repr=False)
    handler: FilesHandler | None = None  #: if these are all leaves of a handler with files of its own


@final
@dataclass(frozen=True, slots=True, eq=False)
class FixedCourse:
    """A save that another one can go on with: its bytes go to the same places, whoever was faster."""

    key: str  #: says what is saved and how; what was done under another one does not count
    n_records: int = 0  #: of what is done, that are in the journal at the beginning
    files: Sequence[str] = ()  #: of data, relative to the checkpoint; none if the layout has places
    file_bytes: Sequence[int] = ()  #: of each file
    file: Sequence[int] = ()  #: of each leaf: its file, by number
    offset: Sequence[int] = ()  #: of each leaf: where its first chunk begins
    stride: Sequence[int] = ()  #: of each leaf: from one chunk to the next
    done: Mapping[int, Mapping[tuple[int, ...], Sequence[tuple[int, int]]]] = field(
        default_factory=dict[int, "Mapping[tuple[int, ...], Sequence[tuple[int, int]]]"]
    )
    """What is there already of leaves that are not whole: of each chunk the ranges of its bytes, in order."""


@final
@dataclass(frozen=True, slots=True)
class Unchanged:
    """The leaves of a tree that are objects which its base was saved with."""

    identity: object  #: of the base, by its store: if it has another one, nothing is known of it
    numbers: Mapping[str, Sequence[int]]  #: of the leaves, by the directory of the tree in the base


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SavePlan:
    """The plan of a save: made by its first stage, for all that follow."""

    infos: Sequence[ParamInfo]  #: of every leaf, in flatten order
    specs: Sequence[LeafSpec]  #: of the same leaves, as they leave the last stage that changes any
    handlers: Sequence[LeafHandler]  #: of the same leaves
    kept: WrittenBatch | None = None  #: leaves that the base holds already, with their places there
    unchanged: Unchanged | None = None  #: leaves that the base may hold, if that is looked for after staging
    digests: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  #: by stored name, if asked for
    references: References = field(default_factory=dict[str, "ReferenceType[Any]"])
    """What can never change of what is saved, by stored name."""
    changes: Mapping[int, LeafChange] = field(default_factory=dict[int, "LeafChange"])
    """What stages declare that they do to leaves, by leaf."""
    sizes_known: bool = True  #: whether the bytes to be written are known: no leaf has a codec
    joint: JointPlan | None = None  #: if several processes save together
    beside: Sequence[Document] = ()  #: further documents, named from the checkpoint
    course: FixedCourse | None = None  #: if another run is to go on where this one ends

    @property
    def sizes(self) -> Sequence[int]:
        """Array bytes of each leaf that this process is to write."""
        return [spec.nbytes for spec in self.specs] if self.joint is None else self.joint.shares


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous byte range of one chunk, on the host and safe from the caller's next step."""

    leaf: Leaf
    chunk: tuple[int, ...]
    start: int  #: offset in the chunk, bytes
    data: memoryview  #: bytes, one-dimensional and contiguous
    cost: int = 0  #: bytes leased for it
    coded: int | None = None  #: if the chunk is encoded: how many bytes all of it became, which `start` is in

    def __post_init__(self) -> None:
        end, whole = self.start + len(self.data), self.chunk_nbytes
        if end > whole:
            raise ChangedLeafError(self.leaf.info.key_path, f"a chunk of {whole} bytes", f"{end} bytes")

    @property
    def key_path(self) -> str:
        """The key path of the leaf, for people."""
        return self.leaf.info.key_path

    @property
    def name(self) -> str:
        """The stored name of the leaf."""
        return self.leaf.info.name

    @property
    def nbytes(self) -> int:
        """Length of the piece."""
        return len(self.data)

    @property
    def chunk_nbytes(self) -> int:
        """Stored bytes of the whole chunk that it is of."""
        return self.leaf.spec.chunk_nbytes if self.coded is None else self.coded


@final
@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Extents of leaves that follow one another in one buffer. Its rows are `Piece`s.

    They are all chunks of some leaves, of each in C order: what costs a small leaf most is an object for it
    alone in every message, so thousands of them travel, are written and are counted together. Or there is one
    extent, in one chunk of one leaf.
    """

    leaves: Sequence[Leaf]  #: without values
    data: memoryview  #: bytes, one-dimensional and contiguous
    cost: int  #: bytes leased for them
    chunk: tuple[int, ...] | None = None  #: that the only extent is in; None for all chunks of the leaves
    start: int = 0  #: of the only extent in its chunk, bytes
    coded: int | None = None  #: if the chunk is encoded: how many bytes all of it became

    def __post_init__(self) -> None:
        found = len(self.data)
        if self.chunk is None:
            planned = sum(self.sizes)
            text, fits = f"{planned} bytes, with {len(self.leaves)} leaves in one buffer", found == planned
        else:
            found += self.start
            text, fits = f"a chunk of {self.chunk_nbytes} bytes", found <= self.chunk_nbytes
        if not fits:
            first = self.leaves[0].info.key_path if self.leaves else ""
            raise ChangedLeafError(first, text, f"{found} bytes")

    @classmethod
    def of(cls, piece: Piece) -> Extents:
        """Return the extent that a piece is."""
        return cls((piece.leaf,), piece.data, piece.cost, piece.chunk, piece.start, piece.coded)

    def __iter__(self) -> Iterator[Piece]:
        if self.chunk is not None:
            yield Piece(self.leaves[0], self.chunk, self.start, self.data, self.cost, self.coded)
            return

        at = 0
        for leaf in self.leaves:
            nbytes = leaf.spec.chunk_nbytes
            for chunk in leaf.spec.chunk_indices():
                yield Piece(leaf, chunk, 0, self.data[at : at + nbytes], nbytes)
                at += nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all extents."""
        return len(self.data)

    @property
    def specs(self) -> Sequence[LeafSpec]:
        """The spec of each leaf."""
        return in_columns(self.leaves).specs if self.chunk is None else (self.leaves[0].spec,)

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each leaf here."""
        return in_columns(self.leaves).sizes if self.chunk is None else (len(self.data),)

    @property
    def chunk_nbytes(self) -> int:
        """Stored bytes of all of the chunk that the only extent is in."""
        return self.leaves[0].spec.chunk_nbytes if self.coded is None else self.coded

    @property
    def holds_whole_chunks(self) -> bool:
        """True unless it is a part of a chunk."""
        return self.chunk is None or len(self.data) == self.chunk_nbytes

    def divided(self, ends: Iterable[int]) -> Iterator[Extents]:
        """Yield the complete leaves in runs, each up to one of `ends`, in order."""
        sizes = self.sizes
        first = at = 0
        for stop in ends:
            nbytes = sum(sizes[first:stop])
            yield Extents(self.leaves[first:stop], self.data[at : at + nbytes], nbytes)
            first, at = stop, at + nbytes

    def cut(self, most: int) -> Iterator[Extents]:
        """Yield the same in parts of at most `most` bytes, at the ends of leaves if possible."""
        if len(self.data) <= most:
            yield self
        elif self.chunk is not None:
            for at in range(0, len(self.data), most):
                cost = self.cost if at + most >= len(self.data) else 0  # the last one carries it
                yield replace(self, data=self.data[at : at + most], cost=cost, start=self.start + at)
        elif len(self.leaves) == 1:
            for piece in self:
                yield from Extents.of(piece).cut(most)
        else:
            for part in self.divided([stop for _, stop in cuts(self.sizes, most)]):
                yield from part.cut(most)


@dataclass(frozen=True, slots=True)
class Pending:
    """Leaves that their own handler is writing, and its work in the background."""

    leaves: tuple[Leaf, ...]  #: without values
    handler: FilesHandler
    folder: str  #: where it writes them, relative to the checkpoint directory
    writing: Background | None  #: goes on when a wait for it is cancelled; None if another process wrote them


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Bytes of leaves on the host, with the leases on them.

    A stage that drops a batch instead of passing it on releases it.
    """

    leaves: Sequence[Leaf] = ()  #: those whose last bytes are in this batch, or that have none
    extents: tuple[Extents, ...] = ()
    pending: tuple[Pending, ...] = ()
    staged: ByteLease | None = None  #: on the bytes copied to the host
    in_flight: ByteLease | None = None  #: on the bytes on their way to the store
    plan: SavePlan | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """All its bytes."""
        return sum([len(extents.data) for extents in self.extents])

    def parts(self) -> Iterator[Piece]:
        """Yield all its bytes as pieces, each in one chunk of a leaf."""
        for extents in self.extents:
            yield from extents

    def map(self, function: Callable[[Piece], Any], resolve_spec: SpecChange | None = None) -> StagedBatch:
        """Return this batch with `function` applied to each part, and the same leases. Blocking.

        Args:
            function: Gives bytes, as any contiguous buffer; `piece.data` itself where nothing changes.
            resolve_spec: What becomes of the leaves, if that is anything: what the stage declares.

        Raises:
            ChangedLeafError: If the bytes are not as many as the spec says, or if a leaf that travels in
                several pieces gets another shape.
        """
        mapping = _Mapping(function, resolve_spec)
        extents = tuple(map(mapping.extents, self.extents))
        return replace(self, leaves=mapping.leaves(self.leaves), extents=extents)

    def release(self) -> None:
        """Give back both leases. Never blocks, and may be called again."""
        for lease in (self.staged, self.in_flight):
            if lease is not None:
                lease.release()


@final
class _Mapping:
    """The function that `StagedBatch.map` applies to each part."""

    __slots__ = ("_change", "_function")

    def __init__(self, function: Callable[[Piece], Any], change: SpecChange | None) -> None:
        self._function = function
        self._change = change

    def leaf(self, leaf: Leaf) -> Leaf:
        spec = leaf.spec if self._change is None else resolved_spec(leaf.spec, self._change)
        return leaf if spec is leaf.spec else replace(leaf, spec=spec)

    def leaves(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        return leaves if self._change is None else Leaves.of(map(self.leaf, leaves))

    def piece(self, piece: Piece) -> Piece:
        leaf = self.leaf(piece.leaf)
        chunk, start, nbytes = place_of(
            piece.leaf.spec, leaf.spec, piece.chunk, piece.start, piece.nbytes, piece.key_path
        )
        made = self._function(piece)
        if made is piece.data and leaf is piece.leaf:
            return piece
        if piece.coded is not None:
            raise ChangedLeafError(piece.key_path, "encoded", "changed behind that; put the stage before it")

        data = memoryview(made).cast("B")
        if leaf.spec.codec != piece.leaf.spec.codec:  # opaque from here on, and of any length
            return Piece(leaf, chunk, 0, data, min(piece.cost, len(data)), coded=len(data))
        if len(data) != nbytes:
            raise ChangedLeafError(piece.key_path, f"{nbytes} bytes", f"{len(data)} bytes")

        cost = piece.cost if made is piece.data else min(piece.cost, len(data))
        return replace(piece, leaf=leaf, chunk=chunk, start=start, data=data, cost=cost)

    def extents(self, extents: Extents) -> Extents:
        before = list(extents)
        after = list(map(self.piece, before))
        if all(map(is_, before, after)):
            return extents
        if extents.chunk is not None:
            return Extents.of(after[0])

        data = memoryview(b"".join([one.data for one in after]))
        return Extents(self.leaves(extents.leaves), data, len(data))


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """The outcome of writing one batch: a table of where each piece of it is."""

    leaves: Sequence[Leaf]
    written: WrittenTable = _NOTHING_WRITTEN
    handled: tuple[Pending, ...] = ()  #: what handlers wrote into files of their own
    plan: SavePlan | None = field(default=None, repr=False)
    are_names_durable: bool = False  #: of the files: they are, where other processes wrote them
    arranged: ArrangedPart | None = None  #: what this process wrote of files that several write together

    @property
    def nbytes(self) -> int:
        """Bytes that were written."""
        return sum(self.written.nbytes.tolist())

    def parts(self) -> Iterator[Written]:
        """Yield where everything is, piece by piece."""
        return iter(self.written)


@dataclass(frozen=True, slots=True)
class Committed:
    """Everything is on the medium, under a temporary name."""

    n_leaves: int
    nbytes: int  #: array bytes written
    n_files: int
    nbytes_kept: int = 0  #: array bytes shared with the base
    references: References = field(default_factory=dict[str, "ReferenceType[Any]"], compare=False, repr=False)
    """What can never change of what was saved and a later save may link, by stored name."""


@dataclass(frozen=True, slots=True)
class Published:
    """The last message of a save: the checkpoint is durable, under its own name."""

    path: str
    n_leaves: int
    nbytes: int  #: array bytes written
    nbytes_kept: int = 0  #: array bytes that were not written, for the base holds them
    single_writer: bool = False
    """Whether it was only the caller's word that nobody else saved to the same path: the server of the bucket
    ignores conditions, and the option `single_writer` is set."""


@final
class TreeToSave:
    """The caller's tree, until it is taken.

    Taking it lets go of it: a background save must not keep arrays alive that the caller dropped.

    Args:
        tree: The caller's.
        changes: What the stages after the first declare that they do to leaves, in order, by stage name.
        codec_choice: The stage that decides which leaves with the codec `auto` get one; None if none does.
    """

    __slots__ = ("_tree", "changes", "codec_choice")

    def __init__(
        self,
        tree: object,
        changes: Sequence[tuple[str, SpecChange]] = (),
        codec_choice: CodecChoice | None = None,
    ) -> None:
        self._tree: list[object] = [tree]
        self.changes = tuple(changes)
        self.codec_choice = codec_choice

    def take(self) -> object:
        """Return the tree and forget it. To be called once."""
        return self._tree.pop()
