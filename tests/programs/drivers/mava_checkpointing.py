"""Mava: the checkpointer of its learners, in the style from before Orbax had arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tests.programs.program import Program, stand_in

stand_in(
    "omegaconf",
    "mava.base_types",
    "mava.types",
    "mava.systems",
    "jumanji",
    "tensorflow_probability",
    "distrax",
)
PROGRAM = Program(
    "Mava, `utils.checkpointing`", repository="instadeepai/Mava@57c8e64059bd59005d80c1c8278eef65855253b9"
)


class Params(NamedTuple):
    """Parameters of an actor and a critic."""

    actor_params: Any
    critic_params: Any


class State(NamedTuple):
    """The state of a learner."""

    params: Params
    key: jax.Array
    steps: jax.Array


def _state(offset: int) -> State:
    layers = {"params": {"Dense_0": {"kernel": jnp.arange(6.0).reshape(2, 3) + offset, "bias": jnp.zeros(3)}}}
    return State(Params(layers, {"params": {"w": jnp.ones(4) * offset}}), jax.random.PRNGKey(0), jnp.int32(7))


def _checkpointer(directory: Path, **options: Any) -> Any:
    from mava.utils.checkpointing import Checkpointer

    os.chdir(directory)
    return Checkpointer("ppo", checkpoint_uid="run", **options)


def save(directory: Path) -> Mapping[str, object]:
    """Save steps, of which the best stay."""
    metadata = {"system": {"name": "ppo", "shape": (1, 2)}}
    checkpointer = _checkpointer(directory, metadata=metadata, max_to_keep=2)
    saved = [checkpointer.save(step, _state(step), episode_return=step % 3) for step in range(1, 7)]
    manager = checkpointer._manager
    return {"saved": saved, "steps": manager.all_steps(), "best": manager.best_step()}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore the best step. What Mava itself restores with expects the metadata of an earlier Orbax."""
    checkpointer = _checkpointer(directory)
    manager, refused = checkpointer._manager, None
    try:
        checkpointer.restore_params(_state(0).params)
    except TypeError as error:
        refused = error
    return {
        "refused": refused,
        "best": manager.best_step(),
        "state": manager.restore(manager.best_step()),
        "metadata": manager.metadata().custom_metadata,
        "metrics": manager.metrics(manager.latest_step()),
    }
