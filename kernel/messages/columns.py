"""Parts of columns."""

from __future__ import annotations

__all__ = ("as_slice",)

from collections.abc import Sequence
from itertools import islice
from operator import lt


def as_slice(numbers: Sequence[int]) -> slice | None:
    """Return the slice that takes just these places in this order; None if there is a gap, or none of them.

    A slice of a range is a range: the numbers of a million leaves, an object each, would take 40 MB.
    """
    if not numbers or numbers[-1] - numbers[0] != len(numbers) - 1:
        return None

    ascend = isinstance(numbers, range) or all(map(lt, numbers, islice(numbers, 1, None)))
    return slice(numbers[0], numbers[-1] + 1) if ascend else None
