"""Swirl-Dynamics: the callback of its trainer that saves states, and resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import optax
from tests.programs.program import Program, stand_in

stand_in("clu", "tensorflow", "tensorboard", "gin", "ml_collections", "tqdm", "matplotlib", "h5py", "pandas")
stand_in("grain", "seaborn", "xarray", "swirl_dynamics.data")
PROGRAM = Program(
    "Swirl-Dynamics, `templates.callbacks`",
    repository="google-research/swirl-dynamics@7eeea7a53417ace1d485d58939e09faee0896f22",
)


def _state(step: int) -> Any:
    from swirl_dynamics.templates import train_states

    params = {"b": jnp.ones(3, jnp.bfloat16), "w": jnp.arange(6.0).reshape(2, 3) * (step + 1)}
    return train_states.BasicTrainState(
        step=jnp.asarray(step), params=params, opt_state=optax.adam(0.1).init(params), flax_mutables={}
    )


def _trainer(step: int) -> Any:
    state = _state(step)
    return SimpleNamespace(
        train_state=state,
        unreplicated_train_state=state,
        is_distributed=False,
        _maybe_replicate=lambda found: found,
    )


def _callback(directory: Path) -> Any:
    from orbax import checkpoint
    from swirl_dynamics.templates import callbacks

    options = checkpoint.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=2)
    return callbacks.TrainStateCheckpoint(str(directory), options=options)


def save(directory: Path) -> Mapping[str, object]:
    """Train, with evaluations between, and end between two saves."""
    callback = _callback(directory)
    callback.on_train_begin(_trainer(0))
    for step in range(1, 6):
        callback.on_eval_batches_end(_trainer(step), {"error": jnp.asarray(1 / step)})
        callback.on_train_batches_end(_trainer(step), {"loss": jnp.asarray(step), "all": jnp.ones(3)})
    callback.on_train_end(_trainer(5))
    return {"steps": callback.ckpt_manager.all_steps(), "weights": list(_state(5).params.values())}


def restore(directory: Path) -> Mapping[str, object]:
    """Resume, and restore a state for inference, with and without one to compare with."""
    from swirl_dynamics.templates import train_states

    callback, trainer = _callback(directory), _trainer(0)
    callback.on_train_begin(trainer)
    path = str(directory / "checkpoints")
    restore_from = train_states.BasicTrainState.restore_from_orbax_ckpt
    return {
        "state": trainer.train_state,
        "metrics": callback.ckpt_manager.metrics(4),
        "for inference": restore_from(path),
        "an earlier one": restore_from(path, step=4, ref_state=_state(0)),
    }
