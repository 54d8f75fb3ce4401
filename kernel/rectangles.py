"""Ranges of the elements of an array in C order, as rectangles. Pure."""

from __future__ import annotations

__all__ = ("rectangles",)

import itertools
import math
from collections.abc import Iterator, Sequence


def rectangles(
    shape: tuple[int, ...], first: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of elements in C order into rectangles, at most two for each axis.

    Yields:
        The first element, its index along each axis, and the extent of each rectangle, in order.
    """
    while first < stop:
        # The longest rectangle that begins here: rows of the outermost axis that starts afresh.
        axis, inner = len(shape), 1
        while axis and first % (inner * shape[axis - 1]) == 0 and first + inner * shape[axis - 1] <= stop:
            axis -= 1
            inner *= shape[axis]

        start = _unravel(first, shape)
        if not axis:
            yield first, start, shape
            return

        rows = min(shape[axis - 1] - start[axis - 1], (stop - first) // inner)
        extent = (*itertools.repeat(1, axis - 1), rows, *shape[axis:])
        yield first, start, extent
        first += math.prod(extent)


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for n in reversed(shape):
        flat, at = divmod(flat, n)
        index.append(at)

    return tuple(reversed(index))
