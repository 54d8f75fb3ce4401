"""Chunks as Orbax cuts them where several devices hold the same shard: each replica's part is one.

Source:
    ORBAX_FORMAT.md §2.1.
"""

from __future__ import annotations

__all__ = ("split_among_replicas",)

from dataclasses import replace

from penstock.handlers.formats.orbax.writing.chunk_shapes import replica_shape
from penstock.kernel.protocols.leaf import LeafSpec


def split_among_replicas(spec: LeafSpec) -> LeafSpec:
    """Return the spec with its shards split along the first axis that the number of replicas divides.

    Without such an axis, without replicas, and for anything but a jax.Array, it is returned as it is.
    """
    shard = spec.write_shape
    if spec.n_replicas == 1 or shard is None or spec.nbytes == 0 or spec.chunk_shape != shard:
        return spec

    part = replica_shape(shard, spec.n_replicas)
    return spec if part is None else replace(spec, chunk_shape=part, write_shape=part)
