"""Stoix: the checkpointer of its learners, with metadata of the run in each directory of steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tests.programs.program import Program, stand_in

stand_in("omegaconf", "stoix.base_types")
PROGRAM = Program(
    "Stoix, `utils.checkpointing`", repository="EdanToledo/Stoix@8fff19c94a478c1e1ff75fbf10396d488aa25d70"
)


class Params(NamedTuple):
    """Parameters of an actor and a critic, online and of the target."""

    online: Any
    target: Any


class State(NamedTuple):
    """The state of a learner with a recurrent policy."""

    params: Params
    hstates: Any
    key: jax.Array
    done: jax.Array


def _state(offset: int) -> State:
    layers = {
        "params": {"torso": {"kernel": jnp.arange(6.0).reshape(2, 3) + offset}, "log_std": -jnp.ones(3)}
    }
    carry = (jnp.full((2, 4), offset, jnp.bfloat16), jnp.zeros((2, 4)))
    return State(Params(layers, layers), carry, jax.random.PRNGKey(offset), jnp.array([True, False]))


def _checkpointer(directory: Path, **options: Any) -> Any:
    from stoix.utils.checkpointing import Checkpointer

    os.chdir(directory)
    return Checkpointer("sac", checkpoint_uid="run", **options)


def save(directory: Path) -> Mapping[str, object]:
    """Save every second step, of which the best and each eighth stay."""
    metadata = {"arch": {"seed": 3, "path": Path("here")}, "tags": ["a", 1.5, None]}
    checkpointer = _checkpointer(
        directory, metadata=metadata, save_interval_steps=2, max_to_keep=2, keep_period=8
    )
    saved = [checkpointer.save(step, _state(step), jnp.float32(step % 5)) for step in range(1, 14)]
    manager = checkpointer._manager
    return {"saved": saved, "steps": manager.all_steps(), "best": manager.best_step()}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore. What Stoix checks first is the metadata as an earlier Orbax returned it."""
    checkpointer = _checkpointer(directory)
    manager, refused = checkpointer._manager, None
    try:
        checkpointer.restore_params(_state(0).params)
    except TypeError as error:
        refused = error
    return {
        "refused": refused,
        "state": manager.restore(manager.latest_step()),
        "at 8": manager.restore(8),
        "metadata": manager.metadata().custom_metadata,
        "metrics": manager.metrics(8),
    }
