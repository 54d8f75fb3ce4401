"""Chunks as Orbax cuts them where several devices hold the same shard: each replica's part is one.

Source:
    ORBAX_FORMAT.md §2.1.
"""

from __future__ import annotations

__all__ = ("split_among_replicas",)

import json
import math
from dataclasses import replace
from functools import lru_cache

from penstock.kernel.leaf_spec import LeafSpec


def split_among_replicas(spec: LeafSpec) -> LeafSpec:
    """Return the spec with its shards split along the first axis that the number of replicas divides.

    Without such an axis, without replicas, and for anything but a jax.Array, it is returned as it is.
    """
    if spec.sharding is None or not spec.shape or spec.nbytes == 0 or spec.chunk_shape != spec.write_shape:
        return spec

    grid = zip(spec.shape, spec.chunk_shape, strict=True)
    shards = math.prod([-(-size // chunk) for size, chunk in grid])
    replicas = _n_devices(spec.sharding) // shards
    axis = next((at for at, size in enumerate(spec.chunk_shape) if size % replicas == 0), None)
    if replicas <= 1 or axis is None:
        return spec

    part = (*spec.chunk_shape[:axis], spec.chunk_shape[axis] // replicas, *spec.chunk_shape[axis + 1 :])
    return replace(spec, chunk_shape=part, write_shape=part)


@lru_cache(maxsize=256)
def _n_devices(sharding: str) -> int:
    """Devices of a recorded sharding; 1 for one device, and for kinds that have no mesh."""
    return math.prod(json.loads(sharding).get("shape") or ())
