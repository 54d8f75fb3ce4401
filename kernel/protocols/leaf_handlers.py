"""Leaf handlers, and the leaves that they get: one on its way out, and one on its way in.

The streaming protocol is `LeafHandler`, with its optional capabilities; the batch protocol is `TypeHandler`.
"""

from __future__ import annotations

__all__ = (
    "BufferHandler",
    "ChunkBuffersHandler",
    "ChunkingHandler",
    "FilledPack",
    "GlobalHandler",
    "HandlerLookup",
    "Leaf",
    "LeafHandler",
    "PackingHandler",
    "PartOf",
    "PartsHandler",
    "ReadLeaf",
    "SigningHandler",
    "SnapshotHandler",
    "TypeHandler",
    "Waitable",
)

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from penstock.kernel.errors import TreeDifference
from penstock.kernel.protocols.capability import Capability
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Read, Target
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


class FilledPack(Protocol):
    """Small leaves whose bytes lie in one buffer; columns of one length."""

    @property
    def specs(self) -> Sequence[LeafSpec]: ...
    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each leaf."""
        ...

    @property
    def details(self) -> Sequence[Any]:
        """The result of the handler's `pack_details` for each leaf."""
        ...

    @property
    def data(self) -> memoryview:
        """The bytes of all leaves; gone once the values are built."""
        ...

    @property
    def starts(self) -> Sequence[int]:
        """The offset of each leaf's bytes in `data`."""
        ...


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
            value: The leaf; `spec.is_global`.
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
            target: What the handler's own `target` returned for it.
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

    def describe(self, value: Any, info: ParamInfo) -> LeafSpec:
        """Say what would be stored of `value`. Reads no array bytes, writes nothing.

        Raises:
            InvalidLeafError: If the value cannot be stored; the message says why.
            DeletedLeafError: If the array is deleted or donated.
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

    def target(self, stored: StoredLeaf, like: Any, has_like: bool) -> Target | TreeDifference:
        """Decide what to read so that `build` can make what `like` describes, or return the difference.

        Args:
            stored: The leaf on disk; of any typestr.
            like: A concrete value, an abstract one, or a type; ignored unless `has_like`.
            has_like: False for a restore without a target, which gives the saved type where it is available.
        """
        ...

    def build(self, leaves: Sequence[ReadLeaf]) -> Sequence[Any]:
        """Make the values from the filled regions of each leaf's target. Blocking.

        Returns:
            One value per leaf, in order.
        """
        ...


@runtime_checkable
class PackingHandler(LeafHandler, Capability, Protocol):
    """A `LeafHandler` whose small leaves can be read and built many at a time."""

    def pack_details(self, specs: Sequence[LeafSpec], likes: Sequence[Any] | None) -> Sequence[Any]:
        """Do for many leaves at once what `target` does for one.

        Args:
            specs: Of the leaves on disk, of any typestr.
            likes: What each is to be; None for a restore without a target.

        Returns:
            For each leaf the handler's own detail, if all of its bytes in C order are what
            `build_pack` needs; else None, and `target` will be asked.
        """
        ...

    def build_pack(self, pack: FilledPack) -> Sequence[Any]:
        """Make the values, in order; none may keep the memory of `pack.data`. Blocking."""
        ...


@runtime_checkable
class BufferHandler(Capability, Protocol):
    """A `LeafHandler` whose small leaves can be packed instead of staged one by one."""

    def buffers(self, values: Sequence[Any], spec: LeafSpec) -> Sequence[Any]:
        """Return for each value an object whose buffer (PEP 688) is its only chunk, to be copied at once.

        A leaf with None goes through `pieces`; so do all of them on an error while the bytes are copied.
        Blocking.

        Args:
            values: Of leaves that have one signature, if the handler gives signatures.
            spec: How they are stored, all alike.
        """
        ...


@runtime_checkable
class ChunkBuffersHandler(Capability, Protocol):
    """A `BufferHandler` whose small leaves can be packed even if they are stored in several chunks."""

    def chunk_buffers(self, values: Sequence[Any], spec: LeafSpec) -> Sequence[Any]:
        """Return for each value an object whose buffer is its chunks, one after another in C order.

        All else is as for `buffers`.
        """
        ...


@runtime_checkable
class SigningHandler(Capability, Protocol):
    """A `LeafHandler` whose descriptions can be reused when the same tree is saved again."""

    def signature(self, value: Any) -> object:
        """Return a value that is cheap to make and compare. Equal signatures mean equal `LeafSpec`s.

        None if there is no such value, or if `describe` would refuse the leaf for a reason that the
        signature does not show (a deleted array).
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
