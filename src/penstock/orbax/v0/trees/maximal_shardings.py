"""Shardings that cut each array into as many parts as there are devices, or nearly."""

from __future__ import annotations

__all__ = ("construct_maximal_shardings",)

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

_jax: Any = jax
_sharding: Any = jax.sharding


def construct_maximal_shardings(abstract_state: Any, devices: Sequence[Any] | None = None) -> Any:
    """Return a tree with a sharding for each leaf, to restore what one device has no memory for.

    The longest axes of an array are cut first, each into equal parts. An array with fewer elements along each
    axis than there are devices is replicated.

    Args:
        abstract_state: A tree of arrays, or of structs with their shape.
        devices: Where the parts are to lie; by default on all.
    """
    chosen = np.asarray(_jax.devices() if devices is None else devices)
    return _jax.tree.map(partial(_sharding_of, devices=chosen), abstract_state)


def _sharding_of(leaf: Any, devices: Any) -> Any:
    shape, n_devices = tuple(leaf.shape), int(devices.size)
    if max(shape, default=0) < min(n_devices, _jax.device_count()):
        return _sharding.NamedSharding(_sharding.Mesh(devices, ("a",)), _sharding.PartitionSpec())

    counts, axes = _cuts(shape, n_devices)
    names = tuple(chr(ord("a") + at) for at in range(len(counts)))
    spec = [names[axes.index(axis)] if axis in axes else None for axis in range(len(shape))]
    mesh = _sharding.Mesh(devices.reshape(counts), names)
    return _sharding.NamedSharding(mesh, _sharding.PartitionSpec(*spec))


def _cuts(shape: tuple[int, ...], n_devices: int) -> tuple[list[int], list[int]]:
    """Return the shape of the mesh, and which axes of the array its first axes cut."""
    left, counts, axes = n_devices, list[int](), list[int]()
    for axis in map(int, np.argsort(shape)[::-1]):
        parts = math.gcd(shape[axis], left) if shape[axis] >= left else 1
        if parts > 1:
            counts.append(parts)
            axes.append(axis)
            left //= parts

    return (counts if left == 1 else [*counts, left]), axes
