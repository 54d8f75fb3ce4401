"""Small leaves of a restore, in columns: what costs such a leaf most is to be an object of its own."""

from __future__ import annotations

__all__ = (
    "HostPack",
    "IndexedValues",
    "ReadPack",
)

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final, overload

if TYPE_CHECKING:
    from penstock.kernel.messages.restore import ReadLeaf
    from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
    from penstock.kernel.protocols.leaf_handlers import PackingHandler


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadPack(Sequence["ReadLeaf"]):
    """Small leaves that lie in one file, each one raw chunk, and that one handler builds all at once.

    For whoever looks at its leaves it is a sequence of `ReadLeaf`s like any other, made then; a stage
    may pass those on instead of the pack.
    """

    handler: PackingHandler
    file: str  #: absolute
    indices: Sequence[int]  #: places in the result's flatten order
    specs: Sequence[LeafSpec]
    details: Sequence[Any]  #: the handler's own, for `build_pack`
    offsets: Sequence[int]  #: bytes from the start of the file
    crc32cs: Sequence[int]  #: of the bytes as they were written; -1 if it is not known
    sizes: Sequence[int]  #: bytes
    info: Callable[[int], ParamInfo]  #: where a leaf stands, by place in the result
    make: Callable[[int], ReadLeaf]  #: by place in the result
    made: dict[int, ReadLeaf]  #: by place; leaves that were looked at, for there must be one of each

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(self.sizes)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, number: int, /) -> ReadLeaf: ...
    @overload
    def __getitem__(self, number: slice, /) -> tuple[ReadLeaf, ...]: ...
    def __getitem__(self, number: int | slice, /) -> ReadLeaf | tuple[ReadLeaf, ...]:
        if isinstance(number, slice):
            return tuple([self._leaf(index) for index in self.indices[number]])

        return self._leaf(self.indices[number])

    def __iter__(self) -> Iterator[ReadLeaf]:
        return map(self._leaf, self.indices)

    def _leaf(self, index: int) -> ReadLeaf:
        leaf = self.made.get(index)
        return self.made.setdefault(index, self.make(index)) if leaf is None else leaf

    def key_path(self, number: int) -> str:
        """Say, for people, where one of its leaves stands."""
        return self.info(self.indices[number]).key_path

    def part(self, numbers: Sequence[int]) -> ReadPack:
        """Return a pack of some of its leaves."""
        return ReadPack(
            handler=self.handler,
            file=self.file,
            indices=[self.indices[at] for at in numbers],
            specs=[self.specs[at] for at in numbers],
            details=[self.details[at] for at in numbers],
            offsets=[self.offsets[at] for at in numbers],
            crc32cs=[self.crc32cs[at] for at in numbers],
            sizes=[self.sizes[at] for at in numbers],
            info=self.info,
            make=self.make,
            made=self.made,
        )

    def cut(self, most_leaves: int, most_bytes: int) -> Iterator[ReadPack]:
        """Yield packs of at most so many leaves and bytes, in order; a leaf that weighs more is alone."""
        if len(self) <= most_leaves and self.nbytes <= most_bytes:
            yield self
            return

        start = nbytes = 0
        for stop, size in enumerate(self.sizes):
            if stop > start and (stop - start == most_leaves or nbytes + size > most_bytes):
                yield self.part(range(start, stop))
                start, nbytes = stop, 0

            nbytes += size

        yield self.part(range(start, len(self)))


@final
@dataclass(frozen=True, slots=True, eq=False)
class HostPack:
    """A pack whose every byte is on the host."""

    pack: ReadPack
    data: memoryview  #: bytes; gone once the values are built, which keep none of it
    starts: Sequence[int]  #: where each leaf's bytes begin

    @property
    def specs(self) -> Sequence[LeafSpec]:
        """What each leaf is."""
        return self.pack.specs

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each leaf."""
        return self.pack.sizes

    @property
    def details(self) -> Sequence[Any]:
        """The handler's own, for `build_pack`."""
        return self.pack.details


@final
@dataclass(frozen=True, slots=True, eq=False)
class IndexedValues(Sequence[tuple[int, object]]):
    """Finished values with their places, as two columns; a sequence of pairs."""

    indices: Sequence[int]
    values: Sequence[object]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, number: int, /) -> tuple[int, object]: ...
    @overload
    def __getitem__(self, number: slice, /) -> tuple[tuple[int, object], ...]: ...
    def __getitem__(self, number: int | slice, /) -> tuple[int, object] | tuple[tuple[int, object], ...]:
        if isinstance(number, slice):
            return tuple(zip(self.indices[number], self.values[number], strict=True))

        return self.indices[number], self.values[number]

    def __iter__(self) -> Iterator[tuple[int, object]]:
        return zip(self.indices, self.values, strict=True)
