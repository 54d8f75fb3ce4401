"""How a sharding divides arrays of one shape: worked out once, for all arrays that are divided alike."""

from __future__ import annotations

__all__ = ("ShardGrid", "shard_grid")

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from penstock.handlers.leaves.common.contiguous_blocks import flat_index
from penstock.handlers.leaves.jax_arrays.devices import Device, device_indices


@final
@dataclass(frozen=True, slots=True)
class ShardGrid:
    """The shards that the devices of this process hold of an array, as a grid without gaps."""

    shape: tuple[int, ...]  #: of a shard
    counts: tuple[int, ...]  #: shards along each axis
    devices: tuple[Device, ...]  #: in the order of the array's own addressable shards
    places: tuple[int, ...]  #: which shard each of these devices holds, in C order of the grid
    holders: tuple[
        tuple[int, ...], ...
    ]  #: for each shard, in C order: the numbers of the devices that hold it
    indices: tuple[tuple[int, ...], ...]  #: for each shard, in C order: its index in the grid

    def cut(self, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the shards of a whole array, in C order: contiguous, and views where that is possible."""
        n_axes = len(self.shape)
        pairs = [n for pair in zip(self.counts, self.shape, strict=True) for n in pair]
        order = (*range(0, 2 * n_axes, 2), *range(1, 2 * n_axes, 2))
        blocks = np.ascontiguousarray(array.reshape(pairs).transpose(order).reshape(-1, *self.shape))
        return list(blocks) if n_axes else [blocks.reshape(())]  # a list would be of numpy's scalars

    def on_devices(self, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return what each device is to hold of a whole array, each time in memory of its own."""
        shards = self.cut(array)
        if len(shards) == len(self.places):
            return [shards[at] for at in self.places]

        return [
            shards[at] if self.holders[at][0] == number else shards[at].copy()
            for number, at in enumerate(self.places)
        ]


@lru_cache(maxsize=1024)  # keeps no arrays alive, only meshes and devices, which live as long as the process
def shard_grid(sharding: Sharding, shape: tuple[int, ...]) -> ShardGrid | None:
    """Return how arrays of `shape` are divided; None if not evenly, or not wholly in this process."""
    if not sharding.is_fully_addressable or 0 in shape:
        return None

    part = sharding.shard_shape(shape)
    counts = tuple([size // n for size, n in zip(shape, part, strict=True)])
    indices = device_indices(sharding, shape)
    places: list[int] = []
    for index in indices.values():
        bounds = [along.indices(size)[:2] for along, size in zip(index, shape, strict=True)]
        if any(start % n or stop - start != n for (start, stop), n in zip(bounds, part, strict=True)):
            return None

        at = tuple([start // n for (start, _), n in zip(bounds, part, strict=True)])
        places.append(flat_index(at, counts))

    holders: list[list[int]] = [[] for _ in range(math.prod(counts))]
    for number, place in enumerate(places):
        holders[place].append(number)

    if not all(holders):
        return None

    return ShardGrid(
        part,
        counts,
        tuple(indices),
        tuple(places),
        tuple(map(tuple, holders)),
        tuple(itertools.product(*map(range, counts))),
    )
