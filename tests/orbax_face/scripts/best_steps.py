"""The best of several evaluations, its step names padded, as in scripts of reinforcement learning."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

_jnp: Any = jnp


def _manager(ocp: Any, directory: str) -> Any:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        best_fn=lambda metrics: metrics["return"],
        best_mode="max",
        step_prefix="update",
        step_format_fixed_length=6,
    )
    return ocp.CheckpointManager(directory, options=options, metadata={"env": "cartpole"})


def train(ocp: Any, directory: str) -> Any:
    """Save six updates, two of which are worth keeping."""
    with _manager(ocp, directory) as manager:
        for step, score in enumerate([3.0, 9.0, 4.0, 8.0, 1.0, 2.0]):
            runner = {"params": {"w": _jnp.full(3, score)}, "rng": _jnp.arange(2, dtype=_jnp.uint32)}
            manager.save(step, args=ocp.args.StandardSave(runner), metrics={"return": score})
        manager.wait_until_finished()
        return {"steps": sorted(manager.all_steps()), "best": manager.best_step()}


def resume(ocp: Any, directory: str) -> Any:
    """Restore the best update."""
    with _manager(ocp, directory) as manager:
        step = manager.best_step()
        found = manager.restore(step, args=ocp.args.StandardRestore())
        return {
            "step": step,
            "found": found,
            "metrics": manager.metrics(step),
            "metadata": manager.metadata().custom_metadata,
        }
