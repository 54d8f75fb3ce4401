"""The leaves of a checkpoint in columns, made into objects only for whoever looks at one."""

from __future__ import annotations

__all__ = ("StoredArray", "StoredLeaves")

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final, overload

from penstock.handlers.layout.index import prefix_of
from penstock.handlers.layout.names import show_key_path
from penstock.handlers.zarr import ArrayFormat
from penstock.kernel.messages import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf


@final
@dataclass(frozen=True, slots=True)
class StoredArray:
    """What this layout keeps in `StoredLeaf.detail` of a leaf that has array bytes."""

    format: ArrayFormat
    prefix: str  #: of the array's keys in the index: the stored name and a slash, or nothing


@final
@dataclass(frozen=True, slots=True, eq=False)
class StoredLeaves(Sequence[StoredLeaf]):
    """Every leaf and empty marker, in stored order. Immutable: specs and formats are shared by many."""

    directory: str
    keys: Sequence[KeyPath]
    kinds: Sequence[tuple[KeyKind, ...]]
    specs: Sequence[LeafSpec]
    formats: Sequence[ArrayFormat | None]  #: None of what has no array bytes, and of what `details` has
    details: Mapping[int, object] = field(default_factory=dict[int, object])
    """`StoredLeaf.detail` of the few leaves, by number, whose bytes lie elsewhere than such arrays' do."""

    @classmethod
    def of(cls, directory: str, leaves: Iterable[StoredLeaf]) -> StoredLeaves:
        """Put a few leaves, which are at hand, into columns."""
        known = tuple(leaves)
        return cls(
            directory,
            [leaf.info.keys for leaf in known],
            [leaf.info.kinds for leaf in known],
            [leaf.spec for leaf in known],
            [None] * len(known),
            {at: leaf.detail for at, leaf in enumerate(known)},
        )

    @overload
    def __getitem__(self, index: int, /) -> StoredLeaf: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[StoredLeaf, ...]: ...
    def __getitem__(self, index: int | slice, /) -> StoredLeaf | tuple[StoredLeaf, ...]:
        if isinstance(index, slice):
            return tuple([self._leaf(at) for at in range(len(self))[index]])

        return self._leaf(index)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[StoredLeaf]:
        return map(self._leaf, range(len(self)))

    def info(self, at: int) -> ParamInfo:
        """Where one leaf stands."""
        keys, kinds = self.keys[at], self.kinds[at]
        return ParamInfo(keys, kinds, show_key_path(keys, kinds), self.directory)

    def _leaf(self, at: int) -> StoredLeaf:
        info, form = self.info(at), self.formats[at]
        if form is None:
            return StoredLeaf(info, self.specs[at], self.details.get(at))

        return StoredLeaf(info, self.specs[at], StoredArray(form, prefix_of(info.name)))
