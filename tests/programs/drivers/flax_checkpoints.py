"""flax: `flax.training.checkpoints` on Orbax, which is its default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import FrozenDict
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec
from tests.programs.program import Program

PROGRAM = Program("flax, `training.checkpoints`", wheels=("flax==0.12.8",))


def _sharded(values: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec("x", None)))


def _state(offset: int) -> Any:
    weights = {"kernel": _sharded(jnp.arange(32.0).reshape(8, 4) + offset), "bias": jnp.ones(4, jnp.bfloat16)}
    state: Any = train_state.TrainState.create(apply_fn=None, params=FrozenDict(weights), tx=optax.adam(0.1))
    return state.replace(step=offset)


def save(directory: Path) -> Mapping[str, object]:
    """Save as one process and as many do, in the background, over newer steps and without leave to."""
    from flax.training import checkpoints
    from orbax import checkpoint

    written = [checkpoints.save_checkpoint(directory, _state(step), step, keep=2) for step in (1, 3, 30)]
    refused = None
    try:
        checkpoints.save_checkpoint(directory, _state(2), 2, keep=2)
    except Exception as error:  # flax has errors of its own
        refused = error

    saver = checkpoint.AsyncCheckpointer(checkpoint.PyTreeCheckpointHandler())
    for step in (4, 5):
        target = {"state": _state(step), "epoch": step}
        checkpoints.save_checkpoint_multiprocess(
            directory / "several", target, step, prefix="run_", keep=3, orbax_checkpointer=saver
        )
    saver.wait_until_finished()
    return {"written": [Path(one).name for one in written], "refused": refused, "state": _state(30)}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore into a state, a part of it, and without one."""
    from flax.training import checkpoints

    latest = checkpoints.latest_checkpoint(directory)
    return {
        "latest": Path(latest or ""),
        "state": checkpoints.restore_checkpoint(directory, _state(0)),
        "dictionary": checkpoints.restore_checkpoint(directory, None, step=3),
        "several": checkpoints.restore_checkpoint(
            directory / "several", {"state": _state(0), "epoch": 0}, prefix="run_"
        ),
        "absent": checkpoints.restore_checkpoint(directory / "absent", _state(7)).step,
        "available": checkpoints.available_steps(directory, step_type=int),
    }
