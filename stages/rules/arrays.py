"""Arrays that are made from stored ones. Nothing is read: each says which boxes of which leaves it needs.

`pieces` cuts a box of an array into pieces. A piece is a view of a stored box in memory (`Loaded`), or of
what a few such boxes are computed to (`Computed`). Moves of elements change the view alone, so however many
rules moved a leaf, each element is read once and copied once.
"""

from __future__ import annotations

__all__ = (
    "Array",
    "Base",
    "Computed",
    "Constant",
    "Joined",
    "Loaded",
    "Mapped",
    "Piece",
    "Repeated",
    "Reshaped",
    "Scaled",
    "Sliced",
    "Stored",
    "Taken",
    "Transposed",
    "UnfitError",
    "Unpacked",
    "View",
    "evaluate",
    "loaded_boxes",
    "move",
)

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

from penstock.kernel.rectangles import rectangles

Bounds: TypeAlias = tuple[tuple[int, int], ...]
Shape: TypeAlias = tuple[int, ...]
NdArray: TypeAlias = npt.NDArray[Any]


class UnfitError(Exception):
    """A leaf is not what a rule needs; the text says why."""


# Elements are moved as integers of their size, so that each bit stays as it is.
_MOVED_AS: Final = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@final
@dataclass(frozen=True, slots=True)
class View:
    """A strided view of elements that are in C order."""

    shape: Shape
    strides: Shape  #: elements from one index to the next
    offset: int = 0  #: of the first element

    @classmethod
    def whole(cls, shape: Shape) -> View:
        """Return the view of all elements of an array of `shape`, as they are."""
        return cls(shape, c_strides(shape))

    @property
    def is_plain(self) -> bool:
        """True if its elements follow each other in C order."""
        plain = c_strides(self.shape)
        axes = zip(self.shape, self.strides, plain, strict=True)
        return all(size == 1 or stride == wanted for size, stride, wanted in axes)

    def transposed(self, axes: Sequence[int]) -> View:
        """Permute the axes."""
        return View(
            tuple([self.shape[axis] for axis in axes]),
            tuple([self.strides[axis] for axis in axes]),
            self.offset,
        )

    def sliced(self, axis: int, start: int, n: int, step: int = 1) -> View:
        """Keep `n` indices of an axis."""
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[axis]
        shape[axis], strides[axis] = n, strides[axis] * step
        return View(tuple(shape), tuple(strides), offset)

    def reshaped(self, shape: Shape) -> View | None:
        """Return the same elements in another shape; None if no strides give them in C order."""
        strides: list[int] = []
        for outer, inner in axis_groups(self.shape, shape):
            axes = [axis for axis in outer if self.shape[axis] != 1]
            for before, axis in itertools.pairwise(axes):
                if self.strides[before] != self.strides[axis] * self.shape[axis]:
                    return None

            last = self.strides[axes[-1]] if axes else 1
            strides += [last * stride for stride in c_strides([shape[axis] for axis in inner])]

        return View(shape, tuple(strides), self.offset)

    def of(self, data: NdArray, dtype: np.dtype[Any]) -> NdArray:
        """Return the view of elements of `dtype` that are in `data`, as bytes."""
        moved_as = _MOVED_AS.get(dtype.itemsize, dtype)  # a buffer of other dtypes is none to NumPy
        strides = [stride * dtype.itemsize for stride in self.strides]
        return np.ndarray(self.shape, moved_as, data, self.offset * dtype.itemsize, strides).view(dtype)


def c_strides(shape: Sequence[int]) -> Shape:
    """Return the strides of C order, in elements."""
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size

    return tuple(reversed(strides))


def axis_groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the smallest groups of neighbouring axes of two shapes that have as many elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        n_before = n_after = 1
        if i < len(before):
            n_before, i = before[i], i + 1
        if j < len(after):
            n_after, j = after[j], j + 1
        while n_before != n_after:
            if n_before < n_after:
                n_before, i = n_before * before[i], i + 1
            else:
                n_after, j = n_after * after[j], j + 1

        yield range(first, i), range(second, j)


class Base(Protocol):
    """Elements in C order that pieces are views of."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def cost(self) -> int:
        """Host bytes that it takes, with all that it is made of."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A box of a stored leaf, in memory."""

    leaf: int  #: number of the stored leaf
    bounds: Bounds
    dtype: np.dtype[Any]

    @property
    def shape(self) -> Shape:
        return tuple([stop - start for start, stop in self.bounds])

    @property
    def cost(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Elements that a function makes of pieces."""

    shape: Shape
    dtype: np.dtype[Any]
    inputs: tuple[Piece, ...]
    compute: Callable[[Sequence[NdArray], NdArray], None]  #: takes the inputs, fills the second
    working: int = 0  #: bytes for each element that `compute` needs meanwhile

    @property
    def cost(self) -> int:
        made = math.prod(self.shape) * (self.dtype.itemsize + self.working)
        return made + sum([piece.base.cost for piece in self.inputs])


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A box of an array, as a view of what is in memory."""

    start: Shape  #: of its first element, in the array
    base: Loaded | Computed
    view: View

    @property
    def bounds(self) -> Bounds:
        """Its place in the array."""
        return tuple([(at, at + size) for at, size in zip(self.start, self.view.shape, strict=True)])


def loaded_boxes(base: Loaded | Computed) -> Iterator[Loaded]:
    """Yield the stored boxes that elements are made of."""
    if isinstance(base, Loaded):
        yield base
    else:
        for piece in base.inputs:
            yield from loaded_boxes(piece.base)


def evaluate(piece: Piece, memory: Mapping[int, NdArray]) -> NdArray:
    """Return the elements of a piece.

    Args:
        piece: Whose.
        memory: The bytes of each stored box, by its identity.
    """
    base = piece.base
    if isinstance(base, Loaded):
        return piece.view.of(memory[id(base)], base.dtype)

    made: NdArray = np.empty(base.shape, base.dtype)
    base.compute([evaluate(each, memory) for each in base.inputs], made)
    return piece.view.of(made.reshape(-1).view(np.uint8), base.dtype)


class Array(Protocol):
    """An array that is made from stored ones."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        """Cut a box of it into pieces, which cover each element once.

        Args:
            bounds: (start, stop) along each axis, not empty.
        """
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A stored leaf."""

    leaf: int
    shape: Shape
    dtype: np.dtype[Any]

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        base = Loaded(self.leaf, bounds, self.dtype)
        yield Piece(tuple([start for start, _ in bounds]), base, View.whole(base.shape))


@final
class Transposed:
    """Another order of the axes."""

    def __init__(self, inner: Array, axes: Sequence[int]) -> None:
        self._inner, self._axes = inner, tuple(axes)
        self.shape = tuple([inner.shape[axis] for axis in axes])
        self.dtype = inner.dtype

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        inner: list[tuple[int, int]] = [(0, 0)] * len(bounds)
        for each, axis in zip(bounds, self._axes, strict=True):
            inner[axis] = each

        for piece in self._inner.pieces(tuple(inner)):
            start = tuple([piece.start[axis] for axis in self._axes])
            yield Piece(start, piece.base, piece.view.transposed(self._axes))


_FAR: Final = 4
"""Indices that are further apart are read one by one: between them is more than is needed."""


@final
class Sliced:
    """Some indices of an axis, each `step` after the one before."""

    def __init__(self, inner: Array, axis: int, start: int, n: int, step: int = 1) -> None:
        self._inner, self._axis, self._start, self._step = inner, axis, start, step
        self.shape = _with(inner.shape, axis, n)
        self.dtype = inner.dtype

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        axis, step = self._axis, self._step
        first, stop = bounds[axis]
        far = step > _FAR
        for at, end in [(one, one + 1) for one in range(first, stop)] if far else [(first, stop)]:
            inner = (self._start + at * step, self._start + (end - 1) * step + 1)
            for piece in self._inner.pieces(_with(bounds, axis, inner)):
                begin = piece.start[axis] - self._start
                skipped = -begin % step
                n = -((skipped - piece.view.shape[axis]) // step)
                if n > 0:
                    start = _with(piece.start, axis, (begin + skipped) // step)
                    yield Piece(start, piece.base, piece.view.sliced(axis, skipped, n, step))


@final
class Taken:
    """Some indices of an axis, in any order."""

    def __init__(self, inner: Array, axis: int, indices: Sequence[int]) -> None:
        self._inner, self._axis, self._indices = inner, axis, tuple(indices)
        self.shape = _with(inner.shape, axis, len(self._indices))
        self.dtype = inner.dtype

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        axis = self._axis
        at, stop = bounds[axis]
        while at < stop:
            first = self._indices[at]
            end = at + 1
            while end < stop and self._indices[end] == first + end - at:
                end += 1

            for piece in self._inner.pieces(_with(bounds, axis, (first, first + end - at))):
                start = _with(piece.start, axis, piece.start[axis] - first + at)
                yield Piece(start, piece.base, piece.view)

            at = end


@final
class Joined:
    """Arrays one after another along an axis."""

    def __init__(self, parts: Sequence[Array], axis: int) -> None:
        self._parts, self._axis = tuple(parts), axis
        self._starts = [0, *itertools.accumulate([part.shape[axis] for part in parts])]
        self.shape = _with(parts[0].shape, axis, self._starts[-1])
        self.dtype = parts[0].dtype

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        axis = self._axis
        first, stop = bounds[axis]
        for part, (start, end) in zip(self._parts, itertools.pairwise(self._starts), strict=True):
            lo, hi = max(first, start), min(stop, end)
            if lo < hi:
                for piece in part.pieces(_with(bounds, axis, (lo - start, hi - start))):
                    yield Piece(_with(piece.start, axis, piece.start[axis] + start), piece.base, piece.view)


@final
class Reshaped:
    """The same elements in C order, in another shape."""

    def __init__(self, inner: Array, shape: Shape) -> None:
        self._inner, self.shape, self.dtype = inner, shape, inner.dtype
        self._groups = list(axis_groups(inner.shape, shape)) if math.prod(shape) else []

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        for parts in itertools.product(*[list(self._boxes(group, bounds)) for group in self._groups]):
            outer = tuple([each for box, _ in parts for each in box])
            inner = tuple([each for _, box in parts for each in box])
            yield _reshaped(self._inner, inner, outer)

    def _boxes(self, group: tuple[range, range], bounds: Bounds) -> Iterator[tuple[Bounds, Bounds]]:
        """Cut the box along a group of axes, and yield each part with its place along the inner axes."""
        before = tuple([self._inner.shape[axis] for axis in group[0]])
        after = tuple([self.shape[axis] for axis in group[1]])
        wanted = tuple([bounds[axis] for axis in group[1]])
        if len(before) == len(after) == 1:
            yield wanted, wanted
            return

        for first, stop in _flat_ranges(after, wanted):
            yield from _common(after, before, first, stop)


def _reshaped(inner: Array, box: Bounds, outer: Bounds) -> Piece:
    """Return a box of an array, contiguous in each group of axes, in the shape of `outer`."""
    start, shape = tuple([lo for lo, _ in outer]), tuple([hi - lo for lo, hi in outer])
    pieces = list(inner.pieces(box))
    if len(pieces) == 1:
        view = pieces[0].view.reshaped(shape)
        if view is not None:
            return Piece(start, pieces[0].base, view)

    return Piece(start, together(pieces, box, inner.dtype), View.whole(shape))


def together(pieces: Sequence[Piece], box: Bounds, dtype: np.dtype[Any]) -> Computed:
    """Return the pieces of a box as one."""
    places: list[tuple[Any, ...]] = [
        tuple([slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(piece.bounds, box, strict=True)])
        for piece in pieces
    ]

    def fill(parts: Sequence[NdArray], made: NdArray) -> None:
        for place, part in zip(places, parts, strict=True):
            move(part, made[(*place, ...)])  # which is an array, even without axes

    return Computed(tuple([hi - lo for lo, hi in box]), dtype, tuple(pieces), fill)


def _flat_ranges(shape: Shape, bounds: Bounds) -> Iterator[tuple[int, int]]:
    """Yield the ranges of elements in C order that a box is made of."""
    axis = len(shape)
    while axis > 1 and bounds[axis - 1] == (0, shape[axis - 1]):
        axis -= 1

    inner = math.prod(shape[axis:])
    for outer in itertools.product(*[range(*each) for each in bounds[: axis - 1]]):
        row = 0
        for at, size in zip(outer, shape, strict=False):
            row = row * size + at

        lo, hi = bounds[axis - 1] if axis else (0, 1)
        base = row * (shape[axis - 1] if axis else 1)
        yield (base + lo) * inner, (base + hi) * inner


def _common(after: Shape, before: Shape, first: int, stop: int) -> Iterator[tuple[Bounds, Bounds]]:
    """Cut a range of elements into parts that are boxes in both shapes."""
    outer = list(rectangles(after, first, stop))
    inner = list(rectangles(before, first, stop))
    if len(outer) == len(inner) == 1:
        yield _bounds(*outer[0][1:]), _bounds(*inner[0][1:])
        return

    cuts = outer if len(outer) > 1 else inner
    for at, _, extent in cuts:
        yield from _common(after, before, at, at + math.prod(extent))


def _bounds(start: Shape, extent: Shape) -> Bounds:
    return tuple([(at, at + size) for at, size in zip(start, extent, strict=True)])


@final
class Repeated:
    """Each index of an axis several times."""

    def __init__(self, inner: Array, axis: int, times: int) -> None:
        self._inner, self._axis, self._times = inner, axis, times
        self.shape = _with(inner.shape, axis, inner.shape[axis] * times)
        self.dtype = inner.dtype

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        axis, times = self._axis, self._times
        first, stop = bounds[axis]
        for piece in self._inner.pieces(_with(bounds, axis, (first // times, -(-stop // times)))):
            lo, n = piece.start[axis], piece.view.shape[axis]
            begin, end = max(first, lo * times), min(stop, (lo + n) * times)
            shape = _with(piece.view.shape, axis, n * times)

            def fill(parts: Sequence[NdArray], made: NdArray) -> None:
                moved(made)[...] = np.repeat(moved(parts[0]), times, axis)

            base = Computed(shape, self.dtype, (piece,), fill, self.dtype.itemsize)
            view = View.whole(shape).sliced(axis, begin - lo * times, end - begin)
            yield Piece(_with(piece.start, axis, begin), base, view)


@final
class Mapped:
    """A function of each element alone."""

    def __init__(
        self, inner: Array, dtype: np.dtype[Any], function: Callable[[NdArray, NdArray], None]
    ) -> None:
        self._inner, self._function = inner, function
        self.shape, self.dtype = inner.shape, dtype

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        for piece in self._inner.pieces(bounds):
            shape = piece.view.shape

            def fill(parts: Sequence[NdArray], made: NdArray) -> None:
                self._function(parts[0], made)

            yield Piece(piece.start, Computed(shape, self.dtype, (piece,), fill), View.whole(shape))


@final
class Scaled:
    """Numbers times the scale of their block, in float32."""

    def __init__(self, inner: Array, scales: Array, block: Shape, dtype: np.dtype[Any]) -> None:
        self._inner, self._scales, self._block = inner, scales, block
        self.shape, self.dtype = inner.shape, dtype

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        for piece in self._inner.pieces(bounds):
            shape, block = piece.view.shape, self._block
            box = tuple(
                [(lo // size, -(-hi // size)) for (lo, hi), size in zip(piece.bounds, block, strict=True)]
            )
            scales = together(list(self._scales.pieces(box)), box, self._scales.dtype)
            inputs = (piece, Piece((0,) * len(box), scales, View.whole(scales.shape)))
            base = Computed(shape, self.dtype, inputs, _Scaling(piece.bounds, block), 12)
            yield Piece(piece.start, base, View.whole(shape))


@final
@dataclass(frozen=True, slots=True)
class _Scaling:
    bounds: Bounds
    block: Shape

    def __call__(self, parts: Sequence[NdArray], made: NdArray) -> None:
        numbers, scales = parts
        for axis, ((lo, hi), size) in enumerate(zip(self.bounds, self.block, strict=True)):
            rows = np.arange(lo, hi) // size - lo // size
            scales = np.take(scales, rows, axis)

        with np.errstate(all="ignore"):
            product = numbers.astype(np.float32)
            product *= scales.astype(np.float32)
            np.copyto(made, product, casting="unsafe")


_FP4: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@final
class Unpacked:
    """Numbers of 4 bits, two in each byte of rows, each row times a power of two."""

    def __init__(self, inner: Array, scales: Array, dtype: np.dtype[Any]) -> None:
        self._inner, self._scales, self.dtype = inner, scales, dtype
        self.shape = (*inner.shape[:-2], inner.shape[-2] * inner.shape[-1] * 2)

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        n = self._inner.shape[-1] * 2  # numbers of a row
        lo, hi = bounds[-1]
        rows = (lo // n, -(-hi // n))
        box = (*bounds[:-1], rows)
        inner = (*box, (0, n // 2))
        packed = together(list(self._inner.pieces(inner)), inner, self._inner.dtype)
        scales = together(list(self._scales.pieces(box)), box, self._scales.dtype)
        shape = (*scales.shape[:-1], scales.shape[-1] * n)
        inputs = tuple(
            [Piece((0,) * len(each.shape), each, View.whole(each.shape)) for each in (packed, scales)]
        )
        view = View.whole(shape).sliced(len(shape) - 1, lo - rows[0] * n, hi - lo)
        yield Piece(tuple([at for at, _ in bounds]), Computed(shape, self.dtype, inputs, _unpack, 10), view)


def _unpack(parts: Sequence[NdArray], made: NdArray) -> None:
    packed, scales = (part.view(np.uint8) for part in parts)
    numbers = np.empty((*packed.shape, 2), np.float32)
    numbers[..., 0], numbers[..., 1] = _FP4[packed & 15], _FP4[packed >> 4]
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    numbers *= powers[..., None, None]
    with np.errstate(all="ignore"):
        np.copyto(made, numbers.reshape(made.shape), casting="unsafe")


@final
class Constant:
    """One value in each place."""

    def __init__(self, value: NdArray, shape: Shape) -> None:
        self._value, self.shape, self.dtype = value, shape, value.dtype

    def pieces(self, bounds: Bounds) -> Iterator[Piece]:
        def fill(_: Sequence[NdArray], made: NdArray) -> None:
            made[...] = self._value

        shape = tuple([hi - lo for lo, hi in bounds])
        view = View(shape, (0,) * len(shape))
        yield Piece(tuple([lo for lo, _ in bounds]), Computed((), self.dtype, (), fill), view)


def moved(array: NdArray) -> NdArray:
    """Return the elements as what they are moved as."""
    return array.view(_MOVED_AS.get(array.dtype.itemsize, array.dtype))


_ROWS: Final = 512
_COLUMNS: Final = 128
"""Of a block: it is small enough for the cache of a processor, in elements of any size."""
_LINE: Final = 64
"""Bytes. Rows of a block are so far from each other that no two begin in the same set of a cache."""
_PLANE: Final = 2**16
"""Bytes. What is less in each plane is not worth a block."""


def move(part: NdArray, to: NdArray) -> None:
    """Copy elements, bit for bit. Of a large transposed part block by block, in a third of the time.

    Rows of a power of two compete for the few places that a cache has for them, and a transposed copy meets
    all of them for each line. So a block goes through memory in which its rows begin elsewhere.
    """
    source, place = moved(part), moved(to)
    inner, outer = _innermost(source), _innermost(place)
    sides = () if inner == outer else (source.shape[inner], source.shape[outer])
    narrow = not sides or min(sides) * source.itemsize < _LINE
    if narrow or source.itemsize > 8 or math.prod(sides) * source.itemsize < _PLANE:
        place[...] = source
        return

    source, place = (np.moveaxis(array, (outer, inner), (-2, -1)) for array in (source, place))
    room = np.empty((_ROWS, _COLUMNS + max(1, _LINE // source.itemsize)), source.dtype)
    for plane in np.ndindex(source.shape[:-2]):
        rows, made = source[plane], place[plane]
        for first in range(0, rows.shape[0], _ROWS):
            for second in range(0, rows.shape[1], _COLUMNS):
                within = (slice(first, first + _ROWS), slice(second, second + _COLUMNS))
                piece = rows[within]
                block = room[: piece.shape[0], : piece.shape[1]]
                block[...] = piece
                made[within] = block


def _innermost(array: NdArray) -> int:
    """Return the axis whose elements are nearest to each other; 0 if there is none."""
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    return min(axes, key=array.strides.__getitem__, default=0)


def _with(values: tuple[Any, ...], axis: int, value: Any) -> tuple[Any, ...]:
    """Return the values with another one at `axis`."""
    return (*values[:axis], value, *values[axis + 1 :])
