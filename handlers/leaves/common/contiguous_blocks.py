"""Cutting an array into parts that are contiguous in C order."""

from __future__ import annotations

__all__ = ("Box", "boxes", "flat_index", "is_contiguous")

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of an array that is one flat range of its elements in C order."""

    starts: tuple[int, ...]  #: along each axis
    sizes: tuple[int, ...]  #: along each axis
    first: int  #: flat index of its first element in the array that is cut, in C order

    @property
    def n_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


def boxes(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Cut an array of `shape` into boxes, in C order, that together cover each element once.

    One axis is cut into nearly equal steps, the axes before it into single indices, and those after it
    not at all. So boxes have at most two different shapes, and few programs need to be compiled.

    Args:
        shape: Shape of the array; if an axis is empty there are no boxes.
        most: The most elements a box may have, at least 1.
    """
    if 0 in shape:
        return

    axis, inner = _cut_axis(shape, most)
    if axis < 0:
        yield Box((0,) * len(shape), shape, 0)
        return

    length, tail = shape[axis], shape[axis + 1 :]
    n_steps = -(-length // min(length, most // inner))
    step = -(-length // n_steps)
    for row, outer in enumerate(itertools.product(*map(range, shape[:axis]))):
        for at in range(0, length, step):
            starts = (*outer, at, *(0,) * len(tail))
            sizes = (*(1,) * axis, min(step, length - at), *tail)
            yield Box(starts, sizes, (row * length + at) * inner)


def flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The position of an element in C order."""
    flat = 0
    for at, size in zip(index, shape, strict=True):
        flat = flat * size + at

    return flat


def is_contiguous(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the elements of a box are contiguous in an array of `shape`, in C order."""
    axis = len(shape)
    while axis and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1

    return math.prod(box.sizes[: max(axis - 1, 0)]) == 1


def _cut_axis(shape: tuple[int, ...], most: int) -> tuple[int, int]:
    """Return the axis to cut, or -1 if the whole array fits, and how many elements one index of it has."""
    inner = 1
    for axis in reversed(range(len(shape))):
        if inner * shape[axis] > most:
            return axis, inner

        inner *= shape[axis]

    return -1, inner
