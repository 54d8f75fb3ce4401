"""The arrays of a pack, as views of its buffer."""

from __future__ import annotations

__all__ = ("pack_views",)

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.handlers.dtypes import numpy_dtype
from penstock.kernel.protocols.views import FilledPack


def pack_views(host: FilledPack) -> Iterator[npt.NDArray[Any]]:
    """Yield a view of the pack's buffer for each leaf, with its stored shape and dtype.

    Consecutive leaves of one kind without gaps are cut from one larger view, which is faster.
    """
    specs, starts, sizes = host.specs, host.starts, host.sizes
    at = 0
    for _, group in itertools.groupby(specs, key=id):
        stop = at + len(list(group))
        spec, nbytes = specs[at], sizes[at]
        shape, dtype = spec.shape or (), numpy_dtype(spec.dtype)
        if (
            shape
            and nbytes
            and starts[at:stop] == list(range(starts[at], starts[at] + nbytes * (stop - at), nbytes))
        ):
            yield from np.ndarray((stop - at, *shape), dtype, host.data, starts[at])
        else:
            yield from [np.ndarray(shape, dtype, host.data, start) for start in starts[at:stop]]

        at = stop
