"""From the order in which the chunks of an array are stored to that of its elements."""

from __future__ import annotations

__all__ = ("put_in_order",)

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from penstock.kernel.protocols.leaf import LeafSpec

# Elements are only moved, so any type of the right size works; numpy copies integers fastest.
_MOVED_AS: Final = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def put_in_order(specs: Sequence[LeafSpec], data: memoryview, starts: Sequence[int]) -> None:
    """Rearrange the bytes of leaves in place: from chunk after chunk to the whole array in C order. Blocking.

    Leaves of one spec that follow each other are rearranged in one step.

    Args:
        specs: Of the leaves, whose chunks tile them evenly.
        data: Holds the chunks of each leaf, one after another in C order of the grid.
        starts: Where each leaf begins in `data`.
    """
    at = 0
    for _, group in itertools.groupby(specs, key=id):
        stop = at + len(list(group))
        spec, first, nbytes = specs[at], starts[at], specs[at].nbytes
        if not _is_in_order(spec):
            if list(starts[at:stop]) == list(range(first, first + nbytes * (stop - at), nbytes)):
                _rearrange(spec, data[first : first + nbytes * (stop - at)])
            else:
                for start in starts[at:stop]:
                    _rearrange(spec, data[start : start + nbytes])

        at = stop


def _is_in_order(spec: LeafSpec) -> bool:
    """Whether chunk after chunk is C order: on axes before the last that is cut, chunks have one element."""
    last = max([axis for axis, n in enumerate(spec.grid_shape) if n > 1], default=0)
    return all(size == 1 for size in spec.chunk_shape[:last])


def _rearrange(spec: LeafSpec, data: memoryview) -> None:
    """Rearrange leaves of one spec that follow each other."""
    dtype: np.dtype[Any] = _MOVED_AS.get(spec.itemsize) or np.dtype(f"V{spec.itemsize}")
    n_axes = len(spec.chunk_shape)
    stored = np.frombuffer(data, dtype).reshape(-1, *spec.grid_shape, *spec.chunk_shape)
    pairs = [axis for at in range(1, n_axes + 1) for axis in (at, n_axes + at)]
    np.frombuffer(data, dtype)[:] = stored.transpose(0, *pairs).reshape(-1)
