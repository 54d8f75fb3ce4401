"""init2winit: steps with their number, costs and preemptions, resumed and taken from another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import freeze
from tests.programs.program import Program, stand_in

stand_in("jraph")
PROGRAM = Program(
    "init2winit, `checkpoint`",
    repository="google/init2winit@afd5a84dbb865f41bf8d6b75181d5b421d73806b",
)


def _program() -> Any:
    from init2winit import checkpoint

    return checkpoint


def _manager(directory: Path) -> Any:
    from orbax import checkpoint

    options = checkpoint.CheckpointManagerOptions(max_to_keep=1, create=True)
    return checkpoint.CheckpointManager(directory, options=options)


def _trees(step: int) -> tuple[Any, Any, Any, Any]:
    from init2winit.dataset_lib.data_utils import CpuOffloaded

    params = {"bias": jnp.zeros(3), "kernel": jnp.arange(12.0).reshape(4, 3) * step}
    slow = jax.tree.map(lambda leaf: CpuOffloaded(jax.device_get(leaf)), params)
    optimizer = {"adam": optax.adam(0.1).init(params), "slow": slow}
    return optimizer, freeze(params), {"mean": jnp.full(3, step, jnp.bfloat16)}, {"ema": jnp.float32(step)}


def save(directory: Path) -> Mapping[str, object]:
    """Save three steps, of which one stays, and one again, which it refuses."""
    program, manager = _program(), _manager(directory / "run")
    for step in (10, 20, 30):
        optimizer, *rest = _trees(step)
        program.unreplicate_and_save_checkpoint(optimizer, *rest, step, step // 10, 0.5 * step, manager)
    manager.wait_until_finished()
    try:
        program.save_checkpoint(30, {"global_step": 30}, manager)
        refused = None
    except ValueError as error:
        refused = error
    manager.close()
    return {"refused": refused, "steps": manager.all_steps(), "params": dict(_trees(30)[1])}


def restore(directory: Path) -> Mapping[str, object]:
    """Resume, begin from the other run, begin from nothing, and load without a target."""
    program = _program()
    run, empty = _manager(directory / "run"), _manager(directory / "empty")
    found = {
        "resumed": program.maybe_restore_checkpoint(*_trees(1), orbax_checkpoint_manager=run),
        "begun": program.maybe_restore_checkpoint(
            *_trees(1), orbax_checkpoint_manager=empty, orbax_checkpoint_manager_external=run
        ),
        "at 30": program.load_checkpoint(str(directory / "run"), step=30),
        "latest": program.load_latest_checkpoint(orbax_checkpoint_manager=run),
    }
    found["params"] = dict(found["resumed"][1])
    *_, step, cost, preemptions, restored = program.maybe_restore_checkpoint(
        *_trees(1), orbax_checkpoint_manager=empty
    )
    return {**found, "nothing": (step, cost, preemptions, restored)}
