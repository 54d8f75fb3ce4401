"""Restoring many small jax.Arrays at a time."""

from __future__ import annotations

__all__ = ("make_pack", "pack_placements")

import itertools
from collections.abc import Sequence
from typing import Any, cast

import jax

from penstock.handlers.leaves.common.pack_views import pack_views
from penstock.handlers.leaves.jax_arrays.batched_put import put_small
from penstock.handlers.leaves.jax_arrays.devices import default_device, on_host
from penstock.handlers.leaves.jax_arrays.placement import Placement
from penstock.handlers.leaves.jax_arrays.restore_target import array_target
from penstock.handlers.leaves.jax_arrays.shard_grids import shard_grid
from penstock.handlers.leaves.jax_arrays.shards import PACKED
from penstock.kernel.errors import UnsupportedFormatError
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.reads import Target
from penstock.kernel.protocols.views import FilledPack

_NOWHERE = ParamInfo((), (), "")


def pack_placements(specs: Sequence[LeafSpec], likes: Sequence[Any] | None) -> list[Placement | None]:
    """Decide where to place the array of each leaf; None for a leaf that cannot be part of a pack.

    A tree has many leaves but few kinds of them, so leaf and target are compared once for each kind.
    """
    wanted = [None] * len(specs) if likes is None else likes
    alike: dict[Placement, Placement] = {}  # equal ones are one object: such arrays are made in one step
    known: dict[object, Placement | None] = {}
    placements: list[Placement | None] = []
    # A loop, because `map` and `zip` over all leaves would hold the interpreter to their ends.
    for spec, like in zip(specs, wanted, strict=True):
        kind = (id(spec), None if like is None else _kind(like))
        if kind not in known:
            found = _placement(spec, like)
            known[kind] = None if found is None else alike.setdefault(found, found)

        placements.append(known[kind])

    return placements


def _kind(like: Any) -> object:
    """What `array_target` depends on. The objects identified by their ids live as long as `like`."""
    if isinstance(like, jax.Array):
        return like.shape, id(like.dtype), id(like.sharding), like.committed, id(type(like))
    if type(like) is jax.ShapeDtypeStruct:
        return like.shape, id(like.dtype), id(like.sharding)

    return id(like)


def _placement(spec: LeafSpec, like: Any) -> Placement | None:
    try:
        target = array_target(StoredLeaf(_NOWHERE, spec), like)
    except UnsupportedFormatError:
        return None  # it is raised again when the leaf is restored on its own
    if not isinstance(target, Target) or spec.dtype in PACKED:
        return None

    placement = cast("Placement", target.detail)
    plain = not (placement.as_numpy or placement.wide or placement.key_impl)
    even = placement.sharding is None or shard_grid(placement.sharding, spec.shape or ()) is not None
    return placement if plain and even else None


def make_pack(host: FilledPack) -> list[jax.Array]:
    """Make the array of every leaf. Blocking."""
    views = list(pack_views(host))
    kinds = zip(map(id, host.specs), map(id, host.details), strict=True)
    arrays: list[jax.Array] = []
    at = 0
    for _, group in itertools.groupby(kinds):
        stop = at + len(list(group))
        sharding = cast("Placement", host.details[at]).sharding
        arrays += put_small(views[at:stop], sharding)
        on_cpu = default_device().platform == "cpu" if sharding is None else on_host(sharding)
        if not on_cpu:  # the buffer may be freed after this call
            cast("Any", jax).block_until_ready(arrays[at:stop])

        at = stop

    return arrays
