"""Chooses which process writes what several of them hold. Pure."""

from __future__ import annotations

__all__ = ("balanced", "each_its_own")

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.kernel.protocols.leaf import LeafSpec


def balanced(specs: Sequence[LeafSpec]) -> Sequence[LeafSpec]:
    """Return the specs with the replica that writes each array which only one replica writes.

    Each process makes the same choice: the largest arrays come first, each to the replica that has least so
    far. Of equals, one far from those before: neighbouring replicas are mostly of one process. Arrays with
    different numbers of replicas are balanced apart.
    """
    chosen = list(specs)
    alike: dict[tuple[int, int], LeafSpec] = {}
    least: dict[int, list[tuple[int, int, int]]] = {}
    shared = [
        at
        for at, spec in enumerate(specs)
        if spec.is_global and spec.n_replicas > 1 and spec.n_writers == 1 and spec.nbytes
    ]
    for at in sorted(shared, key=lambda at: (-_shard_bytes(specs[at]), at)):
        spec = specs[at]
        heap = least.setdefault(spec.n_replicas, [])
        if not heap:
            heap.extend((0, rank, writer) for rank, writer in enumerate(_far_apart(spec.n_replicas)))

        nbytes, rank, writer = heap[0]
        heapq.heapreplace(heap, (nbytes + _shard_bytes(spec), rank, writer))
        key = id(spec), writer
        if key not in alike:
            alike[key] = replace(spec, writer=writer)

        chosen[at] = alike[key]

    return chosen


def each_its_own(specs: Sequence[LeafSpec]) -> Sequence[LeafSpec]:
    """Return the specs for local disks: each process writes all that it holds, whoever else holds it, too."""
    known = {id(spec): spec for spec in specs}
    alike = {number: replace(spec, writer=None) for number, spec in known.items()}
    return [alike[id(spec)] if spec.is_global else spec for spec in specs]


def _shard_bytes(spec: LeafSpec) -> int:
    return math.prod(spec.write_shape or ()) * spec.itemsize


def _far_apart(count: int) -> list[int]:
    """Return the numbers below `count`, each far from those before it: bits in reverse order."""
    bits = (count - 1).bit_length()
    return sorted(range(count), key=lambda number: int(f"{number:0{bits or 1}b}"[::-1], 2))
