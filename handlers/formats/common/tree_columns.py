"""The leaves that a layout is given, in columns."""

from __future__ import annotations

__all__ = ("TreeColumns",)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import final, overload

from penstock.kernel.memory.bounded_cache import ByIdentity
from penstock.kernel.messages.leaves import Leaves
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_infos import names_of
from penstock.kernel.protocols.views import StagedLeaf


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Chosen(Sequence[ParamInfo]):
    """Some infos, by number. Each is made on access."""

    infos: Sequence[ParamInfo]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int, /) -> ParamInfo: ...
    @overload
    def __getitem__(self, at: slice, /) -> tuple[ParamInfo, ...]: ...
    def __getitem__(self, at: int | slice, /) -> ParamInfo | tuple[ParamInfo, ...]:
        if isinstance(at, slice):
            return tuple([self.infos[number] for number in self.numbers[at]])

        return self.infos[self.numbers[at]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class TreeColumns:
    """All leaves of a tree in flatten order, empty markers among them."""

    indices: Sequence[int]  #: their places in the tree that was saved, of which this may be a part
    infos: Sequence[ParamInfo]
    specs: Sequence[LeafSpec]

    @classmethod
    def of(cls, leaves: Sequence[StagedLeaf]) -> TreeColumns:
        """Put leaves into columns, in order. Those of a whole plan are taken as they are."""
        if isinstance(leaves, Leaves) and isinstance(leaves.infos, Sequence):
            infos: Sequence[ParamInfo] = leaves.infos
            if leaves.indices == range(len(infos)):
                return cls(leaves.indices, infos, leaves.specs)

        ordered = sorted(leaves, key=attrgetter("index"))
        return cls(
            [leaf.index for leaf in ordered], [leaf.info for leaf in ordered], [leaf.spec for leaf in ordered]
        )

    @property
    def identity(self) -> ByIdentity:
        """A key that is equal for the same places and specs: the very objects."""
        return ByIdentity(self.infos, self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def names(self) -> list[str]:
        """Return the stored name of each."""
        if isinstance(self.infos, _Chosen):
            names = names_of(self.infos.infos)
            return [names[at] for at in self.infos.numbers]

        return names_of(self.infos)

    def chosen(self, numbers: Sequence[int]) -> TreeColumns:
        """Return some of them, by number."""
        if len(numbers) == len(self):
            return self

        return TreeColumns(
            [self.indices[at] for at in numbers],
            _Chosen(self.infos, numbers),
            [self.specs[at] for at in numbers],
        )

    def arrays(self) -> TreeColumns:
        """Return those with array bytes, or of which a shape at least is stored."""
        return self.chosen([at for at, spec in enumerate(self.specs) if spec.shape is not None])

    def texts(self) -> Iterator[tuple[ParamInfo, str]]:
        """Yield each string leaf: its place and its value."""
        for at, spec in enumerate(self.specs):
            if spec.text is not None:
                yield self.infos[at], spec.text
