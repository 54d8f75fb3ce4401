"""Which shards of an array that is spread over processes this one writes."""

from __future__ import annotations

__all__ = ("WrittenPart", "parts_here", "processes_of")

import math
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast, final

from jax.sharding import Sharding

from penstock.handlers.leaves.jax_arrays.devices import Device, Slices, device_indices, devices_of


@final
@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one device of this process writes of an array."""

    device: Device
    shard: tuple[int, ...]  #: grid index of the shard
    number: int  #: which part of the shard: they are cut along one axis


@lru_cache(maxsize=1024)  # keeps no arrays alive, only meshes and devices, which live as long as the process
def parts_here(
    sharding: Sharding, shape: tuple[int, ...], part: tuple[int, ...], writer: int | None
) -> tuple[WrittenPart, ...]:
    """Return what this process writes of arrays of `shape`, shard by shard in C order.

    The replicas of a shard are counted in the order of the devices, as jax does. Replica `writer` writes the
    first part. The others follow at equal distances, around: neighbours are mostly of one process.

    Args:
        sharding: Of the arrays, over devices of any processes.
        shape: Of the whole array; without elements, nothing is written.
        part: The shape of the part that one replica writes: of a shard, or cut from it.
        writer: Which replica writes the first part; None if each process writes all parts that it holds.
    """
    if 0 in shape:
        return ()

    whole = sharding.shard_shape(shape)
    n_parts = math.prod(whole) // math.prod(part)
    replicas: defaultdict[tuple[int, ...], list[Device]] = defaultdict(list)
    for device, index in _all_indices(sharding, shape).items():
        bounds = [along.indices(size)[0] for along, size in zip(index, shape, strict=True)]
        replicas[tuple([start // size for start, size in zip(bounds, whole, strict=True)])].append(device)

    here = set(device_indices(sharding, shape))
    found: list[WrittenPart] = []
    for shard in sorted(replicas):
        devices = replicas[shard]
        if writer is None:
            devices = [device for device in devices if device in here]
        if not devices:  # other processes hold it, and write it elsewhere
            continue

        first, apart = writer or 0, max(1, len(devices) // n_parts)
        for number in range(n_parts):
            device = devices[(first + number * apart) % len(devices)]
            if device in here:
                found.append(WrittenPart(device, shard, number))

    return tuple(found)


@lru_cache(maxsize=1024)  # as above
def processes_of(sharding: Sharding) -> AbstractSet[int]:
    """Return the processes whose devices hold parts of an array of this sharding."""
    return frozenset([device.process_index for device in devices_of(sharding)])


def _all_indices(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[Device, Slices]:
    """Which part of an array of `shape` each device holds, those of other processes included."""
    indices: Mapping[Device, Slices] = cast("Any", sharding).devices_indices_map(shape)
    return indices
