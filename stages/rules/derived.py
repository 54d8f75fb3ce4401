"""A checkpoint whose leaves are made of those of another one when they are read.

It is a `StoredCheckpoint` like any other, so that a restore and a conversion treat its leaves as they treat
stored ones. `reads` plans the reads of stored boxes that fill a region: straight into the region where the
order is the same, and by a `TileRead` where it is not.
"""

from __future__ import annotations

__all__ = ("Derivation", "DerivedCheckpoint", "UnfitError")

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, Final, TypeAlias, cast, final

import numpy as np

from penstock.kernel.errors import RulesError, SpecError
from penstock.kernel.protocols.layouts import NamedTensors, PackedCheckpoint, StoredCheckpoint, StoredSize
from penstock.kernel.protocols.leaf import ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import (
    CheckedRead,
    Destination,
    DirectRead,
    Read,
    SharedRead,
    TileRead,
    WholeChunks,
)
from penstock.kernel.protocols.stores import Store
from penstock.kernel.protocols.written import Written
from penstock.stages.rules import arrays
from penstock.stages.rules.arrays import Array, Bounds, Computed, Loaded, NdArray, Piece, View

_LOOKED_AT: Final = 64  #: pieces of a leaf


class UnfitError(Exception):
    """A leaf is not what a rule needs; the text says why."""


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
        return all(map(_is_in_order, self._pieces()))

    def read_bytes(self) -> int:
        """Return the bytes of the stored boxes that it is made of."""
        return sum([box.cost for piece in self._pieces() for box in arrays.loaded_boxes(piece.base)])

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
        pieces = [] if about is None or not isinstance(about, Derivation) else list(about.first_pieces())
        if not pieces:
            return None

        view = _stored_view(max(pieces, key=lambda piece: math.prod(piece.view.shape)))
        steps = [abs(_step(view, axis)) for axis in range(len(view.shape))]
        axes = [axis for axis, size in enumerate(view.shape) if size > 1]
        if math.prod(view.shape) <= far or max(axes, key=steps.__getitem__) == axes[0]:
            return None

        # What is made of several leaves is cut between them first, and then where most is in between.
        shape = list(stored.spec.shape or ())
        for axis in sorted(range(len(shape)), key=lambda axis: steps[axis] or math.inf, reverse=True):
            rest = math.prod(shape) // shape[axis]
            shape[axis] = max(1, min(shape[axis], most // rest))

        return tuple(shape)

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
            yield from _Planner(self.source, index, name, about.array, region, piece_bytes).reads()


def _at(place: ParamInfo, stored: ParamInfo) -> ParamInfo:
    return replace(place, directory=stored.directory)


@final
@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans the reads that fill one region of one made leaf."""

    source: StoredCheckpoint
    index: int
    name: str  #: of the made leaf
    array: Array
    region: Destination
    piece_bytes: int

    def reads(self) -> Iterator[Read]:
        for piece in self.array.pieces(self.region.bounds):
            yield from self._reads(piece)

    def _reads(self, piece: Piece) -> Iterator[Read]:
        base, start = piece.base, self._start(piece)
        if isinstance(base, Loaded) and start is not None and _keeps_order(piece):
            yield from self._straight(base, start)
            return

        view = _stored_view(piece)
        axis = max(range(len(view.shape)), key=partial(_step, view), default=None)
        if axis is None or base.cost <= self.piece_bytes or _step(view, axis) == 0:
            yield self._tile(piece)
            return

        lo, hi = piece.bounds[axis]
        middle = lo + self._middle(piece, axis)
        for half in ((lo, middle), (middle, hi)):
            bounds = (*piece.bounds[:axis], half, *piece.bounds[axis + 1 :])
            for each in self.array.pieces(bounds):
                yield from self._reads(each)

    def _start(self, piece: Piece) -> int | None:
        """Return where in the region's bytes a piece begins; None if it is in several parts there."""
        outer = [hi - lo for lo, hi in self.region.bounds]
        axes = [axis for axis, size in enumerate(piece.view.shape) if size != outer[axis]]
        if axes and any(size != 1 for size in piece.view.shape[: axes[-1]]):
            return None

        first = [at - lo for at, (lo, _) in zip(piece.start, self.region.bounds, strict=True)]
        strides = arrays.c_strides(outer)
        return (
            sum([at * stride for at, stride in zip(first, strides, strict=True)]) * self.array.dtype.itemsize
        )

    def _straight(self, base: Loaded, start: int) -> Iterator[Read]:
        part = _Part(self.region, start, base.bounds, base.cost)
        leaf = self.source.leaves[base.leaf]
        for read in self.source.reads(self.index, leaf, part, self.piece_bytes):
            yield _rebased(read, part)

    def _middle(self, piece: Piece, axis: int) -> int:
        """Return how many indices of an axis the first half has: up to the edge of a stored chunk."""
        n = piece.view.shape[axis]
        base = piece.base
        if isinstance(base, Loaded):
            chunks = self.source.leaves[base.leaf].spec.chunk_shape
            places = zip(base.bounds, arrays.c_strides(base.shape), chunks, strict=False)
            for (lo, hi), stride, chunk in places:
                if stride == piece.view.strides[axis] and hi - lo == n:
                    edge = (lo + n // 2 + chunk // 2) // chunk * chunk - lo
                    return edge if 0 < edge < n else n // 2

        return n // 2

    def _tile(self, piece: Piece) -> TileRead:
        boxes = {id(box): _Box(box.bounds, box.cost) for box in arrays.loaded_boxes(piece.base)}
        reads: list[Read] = []
        for box in arrays.loaded_boxes(piece.base):
            leaf, memory = self.source.leaves[box.leaf], boxes[id(box)]
            reads += self.source.reads(self.index, leaf, memory, self.piece_bytes)

        make = partial(_make, self.source.path, self.name, piece, boxes, self.region, self.array.dtype)
        alone = tuple([_alone(read) for read in reads])
        return TileRead(self.index, alone, make, piece.base.cost, tuple(boxes.values()))


def _stored_view(piece: Piece) -> View:
    """Return the view of what is stored, if a piece is computed of it element by element."""
    while isinstance(piece.base, Computed) and piece.base.inputs and piece.view.is_plain:
        inner = piece.base.inputs[0]
        if inner.view.shape != piece.view.shape:
            break

        piece = inner

    return piece.view


def _step(view: View, axis: int) -> int:
    """Return how far apart the elements of an axis are; 0 if it cannot be cut."""
    return view.strides[axis] if view.shape[axis] > 1 else 0


_Alone: TypeAlias = Any


def _alone(read: Read) -> _Alone:
    assert not isinstance(read, SharedRead | TileRead), "a stored leaf is read alone"
    return read


def _keeps_order(piece: Piece) -> bool:
    """True if a piece has all elements of its base in their order."""
    view = piece.view
    return not view.offset and view.is_plain and math.prod(view.shape) == math.prod(piece.base.shape)


def _is_in_order(piece: Piece) -> bool:
    inputs = () if isinstance(piece.base, Loaded) else piece.base.inputs
    return (_keeps_order(piece) and all(map(_is_in_order, inputs))) or not piece.view.strides


def _rebased(read: Read, part: _Part) -> Read:
    """Return a read into a part of a region as one into the region."""
    if isinstance(read, DirectRead):
        return replace(read, region=part.region, start=part.start + read.start)
    if isinstance(read, CheckedRead):
        parts = tuple([cast("Any", _rebased(each, part)) for each in read.parts])
        return replace(read, parts=parts)

    return read


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A `Destination` that is a range of another one's bytes."""

    region: Destination
    start: int
    bounds: Bounds  #: of a stored leaf
    nbytes: int

    def view(self) -> memoryview:
        return self.region.view()[self.start : self.start + self.nbytes]

    def fresh(self) -> _Part:
        return replace(self, region=self.region.fresh())


@final
class _Box:
    """A `Destination` for a box of a stored leaf that a tile is made of."""

    __slots__ = ("_lock", "_memory", "bounds", "nbytes")

    def __init__(self, bounds: Bounds, nbytes: int) -> None:
        self.bounds, self.nbytes = bounds, nbytes
        self._lock = Lock()
        self._memory: NdArray | None = None

    def adopt(self, memory: memoryview) -> None:
        self._memory = np.frombuffer(memory, np.uint8)

    def bytes(self) -> NdArray:
        with self._lock:
            if self._memory is None:
                self._memory = np.empty(self.nbytes, np.uint8)

            return self._memory

    def view(self) -> memoryview:
        return self.bytes().data

    def fresh(self) -> _Box:
        return _Box(self.bounds, self.nbytes)

    def let_go(self) -> None:
        self._memory = None


def _make(
    path: str,
    name: str,
    piece: Piece,
    boxes: Mapping[int, _Box],
    region: Destination,
    dtype: np.dtype[Any],
) -> None:
    """Fill a part of a region from the boxes that were read, and free those."""
    try:
        made = arrays.evaluate(piece, {number: box.bytes() for number, box in boxes.items()})
    except UnfitError as error:
        raise RulesError(path, [f"{name!r} {error}"]) from None

    shape = [hi - lo for lo, hi in region.bounds]
    whole = np.frombuffer(region.view(), np.uint8).view(dtype).reshape(shape)
    within = zip(piece.bounds, region.bounds, strict=True)
    place: tuple[Any, ...] = tuple([slice(lo - first, hi - first) for (lo, hi), (first, _) in within])
    arrays.move(made, whole[(*place, ...)])
    for box in boxes.values():
        box.let_go()
