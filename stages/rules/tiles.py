"""The reads of stored boxes that fill a region of an array that rules made. Pure.

They go straight into the region where the order is the same. Where it is not, a `TileRead` brings a few
stored boxes into memory of its own, and makes a part of the region from them.
"""

from __future__ import annotations

__all__ = ("block_shape", "is_in_order", "reads_of")

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, TypeAlias, cast, final

import numpy as np

from penstock.kernel.errors import RulesError
from penstock.kernel.protocols.layouts import StoredCheckpoint
from penstock.kernel.protocols.reads import (
    CheckedRead,
    Destination,
    DirectRead,
    Read,
    SharedRead,
    TileRead,
)
from penstock.stages.rules import arrays
from penstock.stages.rules.arrays import Array, Bounds, Computed, Loaded, NdArray, Piece, UnfitError, View


def reads_of(
    source: StoredCheckpoint, index: int, name: str, array: Array, region: Destination, piece_bytes: int
) -> Iterator[Read]:
    """Plan the reads that fill a region of a made leaf; see `StoredCheckpoint.reads`.

    Args:
        source: That has the stored leaves.
        index: What to put into `Read.leaf`.
        name: Of the made leaf.
        array: What it is.
        region: Where its elements go; not empty.
        piece_bytes: Upper bound for one read, and for what a tile is made of.
    """
    return _Planner(source, index, name, array, region, piece_bytes).reads()


def block_shape(pieces: Iterable[Piece], of: Sequence[int], most: int, far: int) -> tuple[int, ...] | None:
    """Return the boxes to spill a leaf in; see `CutLeaves`.

    Args:
        pieces: Some of those that it is made of.
        of: Its shape.
        most: Elements that a box may have.
        far: If fewer elements change their order together, None.
    """
    view = max(map(_stored_view, pieces), key=lambda view: math.prod(view.shape), default=None)
    if view is None:
        return None

    steps = [abs(_step(view, axis)) for axis in range(len(view.shape))]
    axes = [axis for axis, size in enumerate(view.shape) if size > 1]
    if math.prod(view.shape) <= far or max(axes, key=steps.__getitem__) == axes[0]:
        return None

    # What is made of several leaves is cut between them first, and then where most is in between.
    shape = list(of)
    for axis in sorted(range(len(shape)), key=lambda axis: steps[axis] or math.inf, reverse=True):
        rest = math.prod(shape) // shape[axis]
        shape[axis] = max(1, min(shape[axis], most // rest))

    return tuple(shape)


def is_in_order(piece: Piece) -> bool:
    """True if a piece is read in the order in which it is stored, however its elements change."""
    inputs = () if isinstance(piece.base, Loaded) else piece.base.inputs
    return (_keeps_order(piece) and all(map(is_in_order, inputs))) or not piece.view.strides


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
