"""An asyncio training loop: the loop trains on while steps are written, and an evaluator follows them."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import penstock
from penstock.steps import EverySteps, KeepLast

LAST = 12


@jax.jit
def train(weights: jax.Array) -> jax.Array:
    """One step towards a point that all weights like."""
    return weights - 0.1 * (weights - 3.0)


async def trainer(root: Path) -> None:
    """Save every third step, the last ones of which are kept."""
    async with penstock.CheckpointManager(root, save_when=EverySteps(3), keep=KeepLast(2)) as manager:
        weights = jnp.zeros(8)
        for step in range(1, LAST + 1):
            weights = train(weights)
            save = await manager.save(step, {"weights": weights})  # staged: donate or change them now
            if save is not None and step == LAST:
                report = await save  # durable
                print(f"step {step}: {report.nbytes} bytes are safe")


async def evaluator(root: Path) -> list[float]:
    """Restore each step that becomes durable, whoever saves it, and measure it."""
    distances: list[float] = []
    async with penstock.Checkpointer(memory_limit="8MiB") as checkpointer:
        async for step in penstock.watch(root, timeout_s=30, latest_only=True, interval_s=0.05):
            restored = await checkpointer.restore(root / str(step))
            distances.append(float(jnp.abs(restored["weights"] - 3.0).max()))
            if step == LAST:
                break

    return distances


async def both(root: Path) -> None:
    """Train and evaluate side by side, in one loop."""
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(evaluator(root))
        tasks.create_task(trainer(root))

    distances = following.result()
    assert distances
    assert distances == sorted(distances, reverse=True)  # each step is better than the one before
    print("distances:", *(f"{distance:.3f}" for distance in distances))


def main(directory: Path) -> None:
    """Run both in a new root."""
    root = directory / "run"
    root.mkdir()
    asyncio.run(both(root))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
