"""Leaf handlers, and the leaves that they get: one on its way out, and one on its way in.

The streaming protocol is `LeafHandler`, with its optional capabilities; the batch protocol is `TypeHandler`.
"""

from __future__ import annotations

__all__ = (
    "Background",
    "BufferHandler",
    "ChunkingHandler",
    "FilesHandler",
    "GlobalHandler",
    "HandlerLookup",
    "Leaf",
    "LeafHandler",
    "PartOf",
    "PartsHandler",
    "ReadLeaf",
    "ReadLeaves",
    "SnapshotHandler",
    "TypeHandler",
    "Waitable",
)

from collections.abc import Awaitable, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, final, overload, runtime_checkable

from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import TreeDifference
from penstock.kernel.protocols.capability import Capability
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf, StoredRows
from penstock.kernel.protocols.reads import Read, SharedRead, Target, chosen
from penstock.kernel.protocols.written import PiecePlan


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf on its way out. Holding it holds the value, which for a jax.Array is a snapshot."""

    index: int  #: its place in flatten order
    info: ParamInfo
    value: object
    spec: LeafSpec
    handler: LeafHandler

    @property
    def nbytes(self) -> int:
        """Array bytes that are stored of it."""
        return self.spec.nbytes

    def without_value(self) -> Leaf:
        """Return the leaf without its value, so that a staged leaf does not keep an array alive."""
        return replace(self, value=None)


@dataclass(frozen=True, slots=True)
class PartOf:
    """The part of a leaf that a `ReadLeaf` is."""

    index: int  #: the leaf's place in the result's flatten order
    number: int  #: of the part, from 0
    count: int  #: parts of that leaf

    @property
    def is_last(self) -> bool:
        """True if it is the last part in order, which is not always the last to be read."""
        return self.number == self.count - 1


@dataclass(frozen=True, slots=True)
class ReadLeaf:
    """A leaf to be read, or a part of one that is too large for the memory budget.

    The regions of its target are filled when a value is to be built.
    """

    index: int  #: its place in the result's flatten order; of a part, a negative number of its own
    stored: StoredLeaf
    handler: LeafHandler
    target: Target = field(default_factory=Target)
    reads: tuple[Read, ...] = ()
    part: PartOf | None = None  #: None for a whole leaf

    @property
    def ends_leaf(self) -> bool:
        """True if reading this completes a leaf in the count: it is a whole leaf or the last part of one."""
        return self.part is None or self.part.is_last

    @property
    def info(self) -> ParamInfo:
        """The place of the leaf in its tree."""
        return self.stored.info

    @property
    def nbytes(self) -> int:
        """Bytes to be read for it."""
        return sum([read.nbytes for read in self.reads])


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadLeaves(Sequence[ReadLeaf]):
    """Leaves to be read, in columns of one length.

    To a stage it is a sequence of `ReadLeaf`s like any other, and the stage may pass those on instead. What
    costs a small leaf most is an object for it alone: so thousands of them share a read and its buffer, and
    their rows are made on access.
    """

    indices: Sequence[int]  #: places in the result's flatten order; of parts, negative numbers
    handlers: Sequence[LeafHandler]
    specs: Sequence[LeafSpec]  #: as they are stored
    details: Sequence[Any]  #: the handlers' own: `Target.detail` of each
    info: Callable[[int], ParamInfo]  #: where a leaf stands, by index
    make: Callable[[int], ReadLeaf]  #: makes a leaf that is read alone, by index
    made: dict[int, ReadLeaf]  #: those made so far, by index; each is made only once
    shared: SharedRead | None = None
    """Reads all of them, perhaps for several handlers; None if each has reads and regions of its own."""

    @classmethod
    def of(cls, leaves: Sequence[ReadLeaf]) -> ReadLeaves:
        """Return the leaves as columns; most are that already."""
        if isinstance(leaves, ReadLeaves):
            return leaves

        rows = {leaf.index: leaf for leaf in leaves}
        return cls(
            indices=[leaf.index for leaf in leaves],
            handlers=[leaf.handler for leaf in leaves],
            specs=[leaf.stored.spec for leaf in leaves],
            details=[leaf.target.detail for leaf in leaves],
            info=lambda index: rows[index].info,
            make=rows.__getitem__,
            made=rows,
        )

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, number: int, /) -> ReadLeaf: ...
    @overload
    def __getitem__(self, number: slice, /) -> ReadLeaves: ...
    def __getitem__(self, number: int | slice, /) -> ReadLeaf | ReadLeaves:
        if isinstance(number, slice):
            return self.part(range(len(self))[number])

        index = self.indices[number]
        if self.shared is not None and self.shared.buffer.is_filled:
            return self._filled(number, index, self.shared)

        leaf = self.made.get(index)
        return self.made.setdefault(index, self.make(index)) if leaf is None else leaf

    def __iter__(self) -> Iterator[ReadLeaf]:
        return map(self.__getitem__, range(len(self)))

    def _filled(self, number: int, index: int, shared: SharedRead) -> ReadLeaf:
        start, nbytes, spec = shared.buffer.starts[number], shared.sizes[number], self.specs[number]
        region = _InBuffer(spec.shape or (), shared.buffer.data[start : start + nbytes])
        target = Target((region,), nbytes, self.details[number])
        return ReadLeaf(index, StoredLeaf(self.info(index), spec), self.handlers[number], target)

    @property
    def reads(self) -> tuple[Read, ...]:
        """The reads that they need."""
        if self.shared is not None:
            return (self.shared,)

        return tuple([read for leaf in self for read in leaf.reads])

    @property
    def nbytes(self) -> int:
        """Bytes to be read for them."""
        return sum([read.nbytes for read in self.reads])

    @property
    def staging_bytes(self) -> int:
        """Host bytes that are freed once the values are built. Values keep nothing of a shared buffer."""
        if self.shared is not None:
            return self.shared.nbytes

        return sum([leaf.target.staging_bytes for leaf in self])

    @property
    def weights(self) -> Sequence[int]:
        """The host bytes that count for each while it is read."""
        if self.shared is not None:
            return self.shared.sizes

        weights: list[int] = []
        for leaf in self:
            scratch = sum([read.scratch_nbytes for read in leaf.reads])
            weights.append(max(leaf.nbytes, leaf.target.staging_bytes + scratch))

        return weights

    @property
    def n_ended(self) -> int:
        """The number of leaves that are complete once these are read: a part counts if it is the last one."""
        return len(self) if self.shared is not None else sum([leaf.ends_leaf for leaf in self])

    def part(self, numbers: Sequence[int]) -> ReadLeaves:
        """Return some leaves, by number. Those still to be read into a shared buffer get a new one."""
        return replace(
            self,
            indices=chosen(self.indices, numbers),
            handlers=chosen(self.handlers, numbers),
            specs=chosen(self.specs, numbers),
            details=chosen(self.details, numbers),
            shared=None if self.shared is None else self.shared.part(numbers),
        )


@final
@dataclass(frozen=True, slots=True)
class _InBuffer:
    """The region of a leaf that was read into a shared buffer."""

    shape: tuple[int, ...]
    data: memoryview

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        return tuple([(0, size) for size in self.shape])

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def view(self) -> memoryview:
        return self.data

    def fresh(self) -> _InBuffer:
        return _InBuffer(self.shape, memoryview(bytearray(self.nbytes)))


@runtime_checkable
class ChunkingHandler(Capability, Protocol):
    """A `LeafHandler` whose leaves can be chunked, cast and encoded as requested."""

    @property
    def follows_spec(self) -> bool:
        """True if `pieces` honours any `leaf.spec.chunk_shape` and `leaf.spec.dtype`.

        The chunk shape divides the one that `describe` gave. A piece is a whole chunk if `piece_bytes`
        allows it.
        """
        ...


@runtime_checkable
class GlobalHandler(Capability, Protocol):
    """A `LeafHandler` whose values may be spread over the processes of a job.

    Its `pieces` then cover what this process writes, and all processes together every chunk once.
    """

    def nbytes_here(self, value: Any, spec: LeafSpec) -> int:
        """Return how many bytes of the leaf this process writes. Touches no array bytes.

        Args:
            value: The leaf; `spec.replicas.is_global`.
            spec: How it is stored.
        """
        ...

    def processes_of(self, value: Any) -> AbstractSet[int]:
        """Return the processes of the job that hold parts of the leaf. Touches no array bytes."""
        ...


@runtime_checkable
class PartsHandler(Capability, Protocol):
    """A `LeafHandler` that can restore a leaf larger than the memory budget in parts.

    The state of the value under construction is in the parts' `Target.detail`; the handler has none.
    """

    def parts(
        self, stored: StoredLeaf, target: Target, part_bytes: int, *, whole_chunks: bool
    ) -> Sequence[Target]:
        """Split a target into parts that are filled and put in place one by one.

        Allocates nothing.

        Args:
            stored: The leaf on disk.
            target: What the handler's own `targets` returned for it.
            part_bytes: Upper bound for the regions of a part; one element or, with `whole_chunks`, one row
                of chunks may exceed it.
            whole_chunks: Cut only at chunk boundaries, because each chunk is decoded as a whole.

        Returns:
            Targets whose regions together hold what those of `target` would, and whose `staging_bytes`
            are those of their own regions. Nothing if it cannot be cut.
        """
        ...

    def place(self, part: ReadLeaf) -> None:
        """Put the filled regions of a part in place and free their memory. Blocking.

        Called once for each part, in any order, perhaps by several threads at once. A checksum may cover
        several parts, so bytes that were put in place can still turn out to be damaged: then `join` is not
        called.
        """
        ...

    def join(self, part: ReadLeaf) -> Any:
        """Return the value. Called once, with any of the parts, when all of them are in place."""
        ...


T_co = TypeVar("T_co", covariant=True)


class Waitable(Protocol):
    """A future that a `TypeHandler` returns: penstock needs its blocking `result`."""

    def result(self, timeout: float | None = None) -> object: ...


@runtime_checkable
class TypeHandler(Capability, Protocol):
    """The batch protocol of the field: what a third party implements for its own leaf type.

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


@runtime_checkable
class EveryProcess(Capability, Protocol):
    """A `TypeHandler` or `FilesHandler` that says which processes write, where several save together.

    By default process 0 alone serializes a leaf that all processes hold. `finalize` is always called in
    process 0 alone, once all of them have written.
    """

    @property
    def every_process(self) -> bool:
        """True if each process serializes such a leaf. Their files need names of their own."""
        ...


class LeafHandler(Protocol):
    """The streaming protocol: a leaf to its pieces on the host, and buffers back to a value.

    One instance serves many saves and restores at once and keeps no state of any of them.
    """

    @property
    def typestr(self) -> str:
        """The type name that `_METADATA` records."""
        ...

    def describe(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], known: dict[Any, LeafSpec]
    ) -> Sequence[LeafSpec]:
        """Say what would be stored of each value. Reads no array bytes, writes nothing.

        Args:
            values: Leaves, thousands of them at a time.
            infos: Where they stand; each is made on access, so one that is not needed costs nothing.
            known: The handler's own, to find a description again, by shape and dtype for example: when the
                tree is saved again, it gets what it put there. Leaves of one spec, which is one object, go
                through the stages together.

        Returns:
            One spec for each value, in order.

        Raises:
            InvalidLeafError: If a value cannot be stored; the message says why.
            DeletedLeafError: If an array is deleted or donated.
        """
        ...

    def pieces(self, leaf: Leaf, piece_bytes: int) -> Iterator[PiecePlan]:
        """Plan how the leaf gets to the host; each copied piece has at most about `piece_bytes`.

        Together the pieces cover every chunk of `leaf.spec` once, chunk by chunk, in order of
        `start` within a chunk. A piece with `cost` 0 is a view of memory that will not change; it may be
        larger, since `limit_bytes` splits it.

        Raises:
            DeletedLeafError: From here or from `take`, if the array is gone.
        """
        ...

    def targets(self, stored: StoredRows, likes: Sequence[Any] | None) -> Sequence[Target | TreeDifference]:
        """Decide what to read so that `build` can make what each of `likes` describes.

        Args:
            stored: Leaves on disk; of any typestr.
            likes: For each a concrete value, an abstract one, or a type; None for a restore without a
                target, which gives the saved types where they are available.

        Returns:
            For each leaf its target, or how it differs. Leaves of one kind may have one target.
        """
        ...

    def build(self, leaves: ReadLeaves) -> Sequence[Any]:
        """Make the values from the filled regions of each leaf's target. Blocking.

        Of leaves that share a buffer, no value may keep its memory.

        Returns:
            One value per leaf, in order.
        """
        ...


@runtime_checkable
class BufferHandler(Capability, Protocol):
    """A `LeafHandler` whose small leaves can be staged many at a time, in one buffer."""

    def chunk_buffers(self, values: Sequence[Any], spec: LeafSpec) -> Sequence[Any]:
        """Return for each value an object whose buffer (PEP 688) is its chunks, one after another in C order.

        They are copied at once. A leaf with None goes through `pieces`; so do all of them on an error while
        the bytes are copied. Blocking.

        Args:
            values: Of leaves whose spec, as `describe` gave it, is one object.
            spec: How they are stored, all alike.
        """
        ...


@runtime_checkable
class SnapshotHandler(Capability, Protocol):
    """A `LeafHandler` that knows which values are immutable and need not be written twice."""

    @property
    def immutable(self) -> bool:
        """True if a value is immutable: the same object always has the same bytes."""
        ...


class HandlerLookup(Protocol):
    """A registry, as stages need it."""

    def lookup(self, type_: type, key_path: str) -> LeafHandler:
        """Find the handler for leaves of a type.

        Args:
            type_: Of the leaf.
            key_path: Of the leaf, for the error.

        Raises:
            HandlerError: If there is none.
        """
        ...

    def for_typestr(self, typestr: str, key_path: str) -> LeafHandler:
        """Find the handler that wrote a leaf, by the type name on disk.

        Raises:
            HandlerError: If there is none.
        """
        ...


@dataclass(frozen=True, slots=True)
class Background:
    """Background work of a handler. It goes on if the task that waits for it is cancelled."""

    key_path: str  #: the leaves, or what else it is for
    handler: str  #: its name
    what: str  #: what it does, for messages
    wait: Callable[[], Awaitable[None]]  #: may be cancelled, and called again
    #: Takes what to call, in any thread, when work that was waited for is over. None: it ends with the save.
    when_over: Callable[[Callable[[], object]], object] | None = None


@runtime_checkable
class FilesHandler(Capability, Protocol):
    """A `LeafHandler` that stores its leaves in its own files, many leaves in one call.

    Its leaves travel in batches of their own, which name the handler. They have no pieces and no
    regions: `pieces` and `build` are never called.
    """

    @property
    def name(self) -> str:
        """Its name, for messages."""
        ...

    @property
    def inner(self) -> object:
        """The object that does the work. Leaves with the same one are saved together."""
        ...

    def write_size(self, leaves: Sequence[Leaf]) -> int:
        """Host bytes that saving the leaves together holds."""
        ...

    def read_sizes(self, leaves: Sequence[ReadLeaf]) -> Sequence[int | None]:
        """Host bytes that restoring each leaf holds; None where that is not known in advance."""
        ...

    async def save(self, leaves: Sequence[Leaf], threads: Threads, place: object = None) -> Background:
        """Copy the leaves, which go to one directory, and begin to write them.

        The writing cannot be interrupted: if a wait for it is cancelled, the writing goes on.

        Args:
            leaves: To be saved into `info.directory`, in flatten order.
            threads: For the wait.
            place: What it writes to. Kept alive, and so held, while a wait for the work goes on in a
                thread, whether that is awaited or not.

        Returns:
            The writing; waiting for it raises its errors.
        """
        ...

    async def load(self, leaves: Sequence[ReadLeaf]) -> Sequence[Any]:
        """Read the values of leaves that are in one directory, in order."""
        ...

    def finalizing(self, directory: str, threads: Threads, place: object = None) -> Background:
        """Return the call that completes the files in `directory`; it begins when first waited for.

        Once it has begun it cannot be interrupted. If a wait is cancelled before it begins, it never begins.

        Args:
            directory: Where the files are.
            threads: For the call.
            place: As for `save`.
        """
        ...
