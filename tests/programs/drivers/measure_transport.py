"""jax_measure_transport: the states of an optimizer and of a moving average, with a manager and without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from tests.programs.program import Program
from tests.programs.surroundings import bare_package

PROGRAM = Program(
    "jax_measure_transport, `utils.checkpoint`",
    repository="willisma/jax_measure_transport@c12ac49cf0d3f427d9eb23c5c49dc7109c5605b9",
    devices=1,
)


def _program() -> Any:
    bare_package("utils")
    from utils import checkpoint

    return checkpoint


class Model(nnx.Module):
    """A layer with statistics and noise."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def _states(seed: int) -> tuple[Any, Any]:
    model = Model(seed)
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    return nnx.state((model, optimizer)), nnx.state(Model(seed + 10))


def _manager(directory: Path) -> Any:
    return _program().build_checkpoint_manager(
        str(directory / "managed"), save_interval_steps=2, max_to_keep=2, keep_period=6
    )


def save(directory: Path) -> Mapping[str, object]:
    """Save by the manager, which keeps some of the steps, and once without it."""
    program, manager = _program(), _manager(directory)
    for step in range(14):
        program.save_checkpoints(str(directory), step, *_states(step), mngr=manager)
    manager.wait_until_finished()
    program.save_checkpoints(str(directory), 5, *_states(5))
    return {"steps": manager.all_steps(), "state": _states(12)[0], "ema": _states(5)[1]}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore the latest step, and what was saved without the manager, into abstract states."""
    program, manager = _program(), _manager(directory)
    abstract = jax.eval_shape(lambda: _states(1))
    latest = program.restore_checkpoints(str(directory), manager.latest_step(), *abstract, mngr=manager)
    alone = program.restore_checkpoints(str(directory), 5, *abstract)
    return {"steps": manager.all_steps(), "state": latest["state"], "ema": alone["ema"], "items": [*latest]}
