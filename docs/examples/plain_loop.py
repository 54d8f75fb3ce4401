"""A training loop without an event loop: steps by policy, and going on where the last run stopped."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import penstock
from penstock.steps import EverySteps, KeepBest, KeepLast


@jax.jit
def train(weights: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
    """One step towards a point that all weights like."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.sum((w - 3.0) ** 2))(weights)
    return weights - 0.05 * gradient, loss


def run(root: Path, until: int) -> list[int]:
    """Train up to a step; return the steps that this run trained."""
    weights, trained = jnp.zeros(8), []
    with penstock.sync.CheckpointManager(
        root, save_when=EverySteps(5), keep=KeepLast(2) | KeepBest(1, "loss")
    ) as manager:
        latest = manager.latest_step()
        if latest is not None:
            weights = manager.restore(like=weights)

        for step in range(0 if latest is None else latest + 1, until):
            weights, loss = train(weights, step)
            trained.append(step)
            # Returns once the weights may change again; they are written meanwhile.
            manager.save(step, weights, metrics={"loss": float(loss)})

    return trained


def main(directory: Path) -> None:
    """Run twice: the second run goes on."""
    root = directory / "run"
    assert run(root, until=13) == list(range(13))
    assert run(root, until=20) == list(range(11, 20))  # step 10 was the last one saved
    with penstock.sync.CheckpointManager(root, read_only=True) as manager:
        print("steps kept:", *manager.all_steps())
        assert manager.latest_step() == 15


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
