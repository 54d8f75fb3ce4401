"""The leaves of a save in columns, thousands of them at a time."""

from __future__ import annotations

__all__ = ("Leaf", "Leaves", "in_columns")

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, final, overload

from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import Leaf
from penstock.kernel.protocols.reads import as_slice

if TYPE_CHECKING:
    from penstock.kernel.protocols.leaf_handlers import LeafHandler
    from penstock.kernel.protocols.written import ByIndex


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
