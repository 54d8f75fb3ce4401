"""Arrays too large for one msgpack value, which early Orbax cut into flat chunks. Pure.

Source:
    ORBAX_FORMAT.md §1.9.
"""

from __future__ import annotations

__all__ = ("CHUNKED", "MOST_AXES", "joined")

import math
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.handlers.dtypes import numpy_dtype
from penstock.handlers.formats.common.chunk_regions import is_beyond_memory
from penstock.handlers.formats.orbax.chunks.embedded_arrays import PackedArray, Run
from penstock.kernel.errors import CorruptCheckpointError
from penstock.kernel.protocols.leaf import KeyPath

CHUNKED: Final = "__msgpack_chunked_array__"
"""The key that marks a map as such a record. Beside it are `shape` and `chunks`, each by number."""

MOST_AXES: Final = 32  # TensorStore's limit, and numpy's for long


def joined(path: str, members: Sequence[tuple[KeyPath, PackedArray | None]]) -> PackedArray:
    """Make one array of a record of flat chunks.

    Args:
        path: The msgpack file, for errors.
        members: What the record holds: keys from it on, and the value there if it is an array or number.

    Raises:
        CorruptCheckpointError: If chunks are missing, or do not belong together.
    """
    shape = tuple([_size(path, size) for size in _numbered(path, "shape", members)])
    chunks = _numbered(path, "chunks", members)
    if not chunks:
        raise CorruptCheckpointError(path, "an array in chunks has none")
    if len(shape) > MOST_AXES or is_beyond_memory(shape, numpy_dtype(chunks[0].dtype).itemsize):
        raise CorruptCheckpointError(path, f"the shape of an array is beyond any memory: {shape}"[:200])

    runs: list[Run] = []
    first = 0
    for chunk in chunks:
        if len(chunk.shape) != 1 or chunk.dtype != chunks[0].dtype:
            raise CorruptCheckpointError(path, "the chunks of an array are not flat, or of several dtypes")
        runs += [Run(first + run.first, run.count, run.offset) for run in chunk.runs]
        first += chunk.shape[0]

    if first != math.prod(shape):
        raise CorruptCheckpointError(path, f"the chunks of an array {list(shape)} have {first} elements")

    return PackedArray(path, shape, chunks[0].dtype, tuple(runs))


def _numbered(
    path: str, name: str, members: Sequence[tuple[KeyPath, PackedArray | None]]
) -> list[PackedArray]:
    """Return what is below `name`, in the order of its numbers."""
    found: Mapping[KeyPath, PackedArray | None] = {
        keys: array for keys, array in members if keys[:1] == (name,)
    }
    if found == {(name,): None}:
        return []  # an empty container

    arrays: list[PackedArray] = []
    for at in range(len(found)):
        array = found.get((name, str(at)))
        if array is None:
            raise CorruptCheckpointError(path, f"the {name} of an array in chunks lacks number {at}")
        arrays.append(array)

    return arrays


def _size(path: str, number: PackedArray) -> int:
    size = int.from_bytes(number.data or b"", "little", signed=number.dtype == "int64")
    if number.dtype not in ("int64", "uint64") or size < 0:
        raise CorruptCheckpointError(path, "the shape of an array in chunks is not made of sizes")

    return size
