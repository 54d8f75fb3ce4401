"""A benchmark that restores wrong bytes is void."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from tests.bench.trees import State

COMPARED_AT_ONCE = 2**24


class WrongBytesError(Exception):
    """A contender restored something else than was saved."""


def check(found: Iterator[Any], state: State, target: State, label: str) -> None:
    """Compare every leaf bit for bit, and what it is.

    Raises:
        WrongBytesError: If a leaf differs in bytes, shape, dtype, type or sharding, or one is missing.
    """
    leaves = list(found)
    if len(leaves) != len(state.leaves):
        raise WrongBytesError(f"{label}: {len(leaves)} leaves instead of {len(state.leaves)}")

    for leaf, wanted, like, name in zip(leaves, state.leaves, target.leaves, state.names, strict=True):
        if leaf.dtype != wanted.dtype or leaf.shape != wanted.shape:
            raise WrongBytesError(f"{label}: {name} is {leaf.dtype}{leaf.shape}")
        if isinstance(like, np.ndarray) is not isinstance(leaf, np.ndarray):
            raise WrongBytesError(f"{label}: {name} is a {type(leaf).__name__}")
        if isinstance(leaf, jax.Array) and not leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim):
            raise WrongBytesError(f"{label}: {name} is sharded otherwise")
        if not _same(_bytes(leaf), _bytes(wanted)):
            raise WrongBytesError(f"{label}: {name} differs")


def _bytes(leaf: Any) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)


def _same(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> bool:
    parts = range(0, one.size, COMPARED_AT_ONCE)
    return all(
        np.array_equal(one[at : at + COMPARED_AT_ONCE], other[at : at + COMPARED_AT_ONCE]) for at in parts
    )
