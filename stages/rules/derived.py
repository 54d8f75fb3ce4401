"""A checkpoint whose leaves are made of those of another one when they are read.

It is a `StoredCheckpoint` like any other, so that a restore and a conversion treat its leaves as they treat
stored ones.
"""

from __future__ import annotations

__all__ = ("Derivation", "DerivedCheckpoint")

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

from penstock.kernel.errors import SpecError
from penstock.kernel.protocols.layouts import NamedTensors, PackedCheckpoint, StoredCheckpoint, StoredSize
from penstock.kernel.protocols.leaf import ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Destination, Read, WholeChunks
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Written
from penstock.stages.rules.arrays import Array, Piece, loaded_boxes
from penstock.stages.rules.tiles import block_shape, is_in_order, reads_of

_LOOKED_AT: Final = 64  #: pieces of a leaf


@final
@dataclass(frozen=True, slots=True, eq=False)
class Derivation:
    """The origin of a leaf that rules made: the `detail` of its `StoredLeaf`."""

    sources: tuple[str, ...]  #: names of the stored leaves
    rules: tuple[int, ...] = ()  #: numbers of the rules that made it, from 0
    number: int | None = None  #: of the stored leaf that it is, if only its name is another
    array: Array | None = None  #: None of what is no array

    def streams(self) -> bool:
        """True if it is read in the order in which it is stored, however its elements change."""
        return all(map(is_in_order, self._pieces()))

    def read_bytes(self) -> int:
        """Return the bytes of the stored boxes that it is made of."""
        return sum([box.cost for piece in self._pieces() for box in loaded_boxes(piece.base)])

    def first_pieces(self) -> Iterator[Piece]:
        """Yield the first of the pieces that it is made of: others are like them."""
        return itertools.islice(self._pieces(), _LOOKED_AT)

    def _pieces(self) -> Iterator[Piece]:
        if self.array is None or 0 in self.array.shape:
            return iter(())

        return self.array.pieces(tuple([(0, size) for size in self.array.shape]))


@final
@dataclass(frozen=True, eq=False)
class DerivedCheckpoint:
    """A checkpoint whose leaves are made of another one's by rules. Immutable; for any thread."""

    source: StoredCheckpoint
    leaves: Sequence[StoredLeaf]
    places: Sequence[int | None]  #: of each leaf: the number of the stored one that it is, if it is one
    digests: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  #: none: its bytes are not stored

    @property
    def path(self) -> str:
        return self.source.path

    @property
    def directory(self) -> str:
        return self.source.directory

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        return self.source.custom_metadata

    @property
    def tree_custom_metadata(self) -> object:
        return self.source.tree_custom_metadata

    @property
    def root_custom_metadata(self) -> Mapping[str, Any] | None:
        return self.source.root_custom_metadata

    @property
    def committed_at_ns(self) -> int | None:
        return self.source.committed_at_ns

    def parts(self, numbers: Sequence[int], leaves: Sequence[int]) -> Sequence[Sequence[Written]]:
        """Nothing: what is made when it is read cannot be the base of another checkpoint."""
        return [()] * len(numbers)

    def stored_bytes(self, store: Store) -> int:
        """Count what the source stores, and what rules add to it; see `StoredSize`."""
        before = sum([leaf.spec.nbytes for leaf in self.source.leaves])
        after = sum([leaf.spec.nbytes for leaf in self.leaves])
        stored = self.source.stored_bytes(store) if isinstance(self.source, StoredSize) else before
        return stored + max(0, after - before)

    def whole_chunks(self, numbers: Sequence[int]) -> WholeChunks:
        """Say where leaves with another name alone are; see `PackedCheckpoint`."""
        places = [self.places[number] for number in numbers]
        ids, offsets, crc32cs = [-1] * len(places), [0] * len(places), [-1] * len(places)
        plain = [at for at, place in enumerate(places) if place is not None]
        if not plain or not isinstance(self.source, PackedCheckpoint):
            return WholeChunks([], ids, offsets, crc32cs)

        found = self.source.whole_chunks([place for place in places if place is not None])
        for at, id_, offset, crc32c in zip(plain, found.ids, found.offsets, found.crc32cs, strict=True):
            ids[at], offsets[at], crc32cs[at] = id_, offset, crc32c

        return WholeChunks(found.files, ids, offsets, crc32cs)

    def is_cut_freely(self, stored: StoredLeaf) -> bool:
        """See `CutLeaves`: made leaves have no chunks."""
        return isinstance(stored.detail, Derivation) and stored.detail.number is None

    def block_shape(self, stored: StoredLeaf, most: int, far: int) -> tuple[int, ...] | None:
        """Return the boxes to spill a leaf in; see `CutLeaves`."""
        about = stored.detail
        if not isinstance(about, Derivation) or stored.spec.shape is None:
            return None

        return block_shape(about.first_pieces(), stored.spec.shape, most, far)

    def split(self, separator: str) -> StoredCheckpoint:
        """Refuse: names are split before rules apply. See `NamedTensors`."""
        raise SpecError(f"{self.path}: names are split before rules apply")

    def following(self, wanted: Sequence[tuple[ParamInfo, Any]]) -> DerivedCheckpoint:
        """Return the same leaves at the places where the target has their names; see `NamedTensors`."""
        places = {info.name: info for info, _ in wanted}
        leaves = [
            leaf
            if leaf.info.name not in places
            else replace(leaf, info=_at(places[leaf.info.name], leaf.info))
            for leaf in self.leaves
        ]
        if isinstance(self.source, NamedTensors):  # which takes None and empty containers from the target
            names = {leaf.info.name for leaf in leaves}
            followed = self.source.following(wanted).leaves[len(self.source.leaves) :]
            leaves += [leaf for leaf in followed if leaf.info.name not in names]

        added = [None] * (len(leaves) - len(self.leaves))
        return replace(self, leaves=tuple(leaves), places=(*self.places, *added))

    def reads(self, index: int, stored: StoredLeaf, region: Destination, piece_bytes: int) -> Iterator[Read]:
        """Plan the reads of stored boxes that fill `region`; see `StoredCheckpoint.reads`."""
        about = stored.detail
        if not isinstance(about, Derivation):
            yield from self.source.reads(index, stored, region, piece_bytes)
        elif about.number is not None:
            leaf = self.source.leaves[about.number]
            yield from self.source.reads(index, leaf, region, piece_bytes)
        elif about.array is not None and region.nbytes:
            name = stored.info.name
            yield from reads_of(self.source, index, name, about.array, region, piece_bytes)


def _at(place: ParamInfo, stored: ParamInfo) -> ParamInfo:
    return replace(place, directory=stored.directory)
