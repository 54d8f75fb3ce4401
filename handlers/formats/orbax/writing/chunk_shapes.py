"""How a shard is cut into chunks. Pure.

Source:
    ORBAX_FORMAT.md §2.1 for the rules of `chunk_byte_size` and `shard_axes`; tests/interop compares
    the result with Orbax's own.
"""

from __future__ import annotations

__all__ = ("orbax_chunk_shape", "replica_shape", "roughly_equal_chunks")

import math
from collections.abc import Sequence
from typing import Final

_SMALLEST_PART: Final = 16
"""If equal chunks would each be below this part of the target size, one chunk above it is better."""


def orbax_chunk_shape(
    shape: Sequence[int],
    write_shape: Sequence[int],
    itemsize: int,
    chunk_byte_size: int | None,
    shard_axes: Sequence[int] = (),
) -> tuple[int, ...]:
    """Choose the chunk shape that Orbax would choose, axis by axis a divisor of `write_shape`.

    Axes in `shard_axes` are cut into single indices. Then, until a chunk fits, the longest axis shrinks
    to the next smaller divisor of what it was: of those that were cut before or by the sharding, then of
    all.

    Args:
        shape: Of the array.
        write_shape: Of the part that one replica writes.
        itemsize: Bytes of an element.
        chunk_byte_size: Bytes of a chunk, at most; at least `itemsize`. None: any.
        shard_axes: Within the rank.
    """
    divisors = [_divisors(size or 1) for size in write_shape]
    cut = [whole != (part or 1) for whole, part in zip(shape, write_shape, strict=True)]
    for axis in shard_axes:
        cut[axis] = cut[axis] or len(divisors[axis]) > 1
        divisors[axis] = [1]

    sizes = [of_axis[-1] for of_axis in divisors]
    most = math.prod(sizes) if chunk_byte_size is None else chunk_byte_size // itemsize
    while math.prod(sizes) > most:
        candidates = [axis for axis, size in enumerate(sizes) if cut[axis] and size > 1]
        if not candidates:
            cut = [True] * len(sizes)
            continue

        axis = max(candidates, key=sizes.__getitem__)  # of equals, the first
        divisors[axis].pop()
        sizes[axis] = divisors[axis][-1]

    return tuple(sizes)


def replica_shape(shard_shape: Sequence[int], n_replicas: int) -> tuple[int, ...] | None:
    """Choose the part of a shard that each of its replicas writes, as Orbax would.

    The first axis that their number divides is cut into that many parts; None if there is no such axis.
    Replica k writes part k. A shard without elements is not cut.
    """
    if 0 in shard_shape:
        return None

    axis = next((at for at, size in enumerate(shard_shape) if size % n_replicas == 0), None)
    if axis is None:
        return None

    return (*shard_shape[:axis], shard_shape[axis] // n_replicas, *shard_shape[axis + 1 :])


def roughly_equal_chunks(write_shape: Sequence[int], itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    """Choose a chunk shape of at most about `chunk_bytes`, near to it; larger where axes have no divisors.

    Each step cuts the axis that can be cut into the fewest parts, the first of equals: so most chunks
    are contiguous in the shard.
    """
    divisors = [_divisors(size or 1) for size in write_shape]
    sizes = [of_axis[-1] for of_axis in divisors]
    while math.prod(sizes) * itemsize > chunk_bytes:
        steps = [(size / divisors[axis][-2], axis) for axis, size in enumerate(sizes) if size > 1]
        factor, axis = min(steps, default=(math.inf, 0))
        if math.prod(sizes) * itemsize / factor < chunk_bytes / _SMALLEST_PART:
            break

        divisors[axis].pop()
        sizes[axis] = divisors[axis][-1]

    return tuple(sizes)


def _divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
