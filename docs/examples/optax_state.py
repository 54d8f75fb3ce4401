"""An optax optimizer's state: named tuples in tuples, restored as exactly what they were."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import penstock


def main(directory: Path) -> None:
    """Train some steps, save, restore onto shapes alone, and train on."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 100))
    )

    @jax.jit
    def train(params: Any, moments: Any) -> tuple[Any, Any]:
        gradients = jax.grad(lambda p: jnp.mean((p["w"] @ jnp.ones(4) + p["b"]) ** 2))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(3)}
    state = (params, optimizer.init(params))
    for _ in range(3):
        state = train(*state)

    penstock.sync.save(directory / "state", state)

    # What it is to look like can be made without computing anything.
    like = jax.eval_shape(lambda: (params, optimizer.init(params)))
    restored = penstock.sync.restore(directory / "state", like=like)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(train(*restored)), jax.tree.leaves(train(*state)), strict=True):
        assert jnp.array_equal(ours, theirs)

    print("the next step is the same, bit for bit")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
