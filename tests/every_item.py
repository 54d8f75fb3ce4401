"""A checkpoint with an item of each kind, for tests that take checkpoints apart."""

from __future__ import annotations

__all__ = ("every_item",)

from typing import Any

import jax
import numpy as np

import penstock


def every_item(state: Any, **more: Any) -> penstock.Composite:
    """Make the items of a checkpoint: a tree, and one of each other kind, and those given."""
    return penstock.Composite(
        state=state,
        config=penstock.items.Json({"lr": 0.5}),
        scale=penstock.items.Array(np.arange(9.0)),
        key=penstock.items.RandomKey(jax.random.key(7)),
        shuffle=penstock.items.NumpyRandomKey(np.random.RandomState(0).get_state()),
        **more,
    )
