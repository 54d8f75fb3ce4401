"""Kauldron: its checkpointer, as a trainer makes it by default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from tests.programs.program import Program

PROGRAM = Program(
    "Kauldron, `kd.ckpts.Checkpointer`",
    wheels=(
        "kauldron==1.4.2",
        "lark==1.2.2",
        "ml_collections==1.1.0",
        "immutabledict==4.2.1",
        "typeguard==4.4.4",
    ),
)


def _state(offset: float) -> Any:
    from kauldron.checkpoints.checkpoint_items import StandardCheckpointItem

    @struct.dataclass
    class State(StandardCheckpointItem):
        step: jax.Array
        params: Any

    weights = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4) + offset
    return State(step=jnp.asarray(int(offset)), params={"dense": {"bias": weights[0], "kernel": weights}})


def _checkpointer(directory: Path) -> Any:
    from kauldron.checkpoints.checkpointer import Checkpointer

    return Checkpointer(workdir=directory, save_interval_steps=2, max_to_keep=2, best_metric_path="loss")


def save(directory: Path) -> Mapping[str, object]:
    """Save every second step, with metrics."""
    saver = _checkpointer(directory)
    for step in range(7):
        if saver.should_save(step):
            saver.save(_state(step), step=step, metrics={"loss": np.array(step % 4)})
    saver.wait_until_finished()
    return {"steps": saver.all_steps, "latest": saver.latest_step, "state": _state(6)}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore the latest state, with and without a tree, and look at what is there."""
    from kauldron.checkpoints.checkpoint_items import StandardCheckpointItem

    saver = _checkpointer(directory)
    saver.reload()
    return {
        "steps": saver.all_steps,
        "state": saver.restore(_state(0)),
        "tree": saver.restore(StandardCheckpointItem()),
        "followed": next(saver.iter_new_checkpoints(timeout=1)),
        "metadata": {name: list(one.shape) for name, one in saver.item_metadata()["params"]["dense"].items()},
    }
