"""Leaves being restored: large ones one by one, small ones packed in columns.

For a small leaf the largest cost is an object of its own, so thousands of them travel as a few packs.
"""

from __future__ import annotations

__all__ = (
    "HostPack",
    "IndexedValues",
    "ReadPack",
)

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final, overload

from penstock.kernel.messages.leaves import as_slice
from penstock.kernel.protocols.leaf_handlers import ReadLeaf

if TYPE_CHECKING:
    from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
    from penstock.kernel.protocols.leaf_handlers import PackingHandler


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadPack(Sequence[ReadLeaf]):
    """Small leaves in one file, each one raw chunk, that one handler builds in a single call.

    To a stage it is a sequence of `ReadLeaf`s like any other. They are created on access, and the stage may
    pass them on instead of the pack.
    """

    handler: PackingHandler
    file: str  #: absolute
    indices: Sequence[int]  #: places in the result's flatten order
    specs: Sequence[LeafSpec]
    details: Sequence[Any]  #: the handler's own, for `build_pack`
    offsets: Sequence[int]  #: bytes from the start of the file
    crc32cs: Sequence[int]  #: of the bytes as they were written; -1 where it is not known
    sizes: Sequence[int]  #: bytes
    info: Callable[[int], ParamInfo]  #: where a leaf stands, by place in the result
    make: Callable[[int], ReadLeaf]  #: makes a leaf, by place in the result
    made: dict[int, ReadLeaf]  #: leaves created so far, by place; each is created only once

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
        """Return the key path of one of its leaves, as people read it."""
        return self.info(self.indices[number]).key_path

    def part(self, numbers: Sequence[int]) -> ReadPack:
        """Return a pack of some of its leaves."""
        indices, neighbours = self.indices, as_slice(numbers)
        return ReadPack(
            handler=self.handler,
            file=self.file,
            indices=[indices[at] for at in numbers] if neighbours is None else indices[neighbours],
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
        """Yield packs of at most `most_leaves` and `most_bytes`, in order; a larger leaf comes alone."""
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
    """A pack whose bytes are all on the host."""

    pack: ReadPack
    data: memoryview  #: bytes, writable; freed once the values are built, which keep no reference to it
    starts: Sequence[int]  #: where each leaf's bytes begin in `data`

    @property
    def specs(self) -> Sequence[LeafSpec]:
        """The spec of each leaf."""
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
    """Finished values with their places: a sequence of pairs that is held as two columns."""

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
