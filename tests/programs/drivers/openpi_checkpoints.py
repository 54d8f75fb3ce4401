"""openpi: the checkpoints of its training, in the style from before Orbax had arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tests.programs.program import Program, stand_in

stand_in(
    "augmax", "openpi.models_pytorch", "openpi.shared.image_tools", "openpi.training.data_loader", "torch"
)
PROGRAM = Program(
    "openpi, `training.checkpoints`",
    wheels=(
        "jaxtyping==0.2.36",
        "beartype==0.19.0",
        "numpydantic==1.6.9",
        "pydantic==2.11.7",
        "pydantic-core==2.33.2",
        "annotated-types==0.7.0",
        "typing-inspection==0.4.1",
    ),
    repository="Physical-Intelligence/openpi@15a9616a00943ada6c20a0f158e3adb39df2ccac",
    path="src",
)


def _state(seed: int, step: int) -> Any:
    from openpi.training import utils

    model = nnx.Linear(3, 4, rngs=nnx.Rngs(seed))
    params = nnx.state(model)
    tx = optax.adam(0.1)
    return utils.TrainState(
        step=jnp.asarray(step),
        params=params,
        model_def=nnx.graphdef(model),
        opt_state=tx.init(params),
        tx=tx,
        ema_decay=0.9,
        ema_params=nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(seed + 100))),
    )


def _loader() -> Any:
    from openpi.shared.normalize import NormStats

    stats = {"state": NormStats(mean=np.zeros(2), std=np.ones(2))}
    return SimpleNamespace(data_config=lambda: SimpleNamespace(norm_stats=stats, asset_id="robot"))


def save(directory: Path) -> Mapping[str, object]:
    """Save three steps, of which the last stays."""
    from openpi.training import checkpoints

    manager, resuming = checkpoints.initialize_checkpoint_dir(
        directory / "run", keep_period=2, overwrite=False, resume=False
    )
    for step in (1, 2, 3):
        checkpoints.save_state(manager, _state(step, step), _loader(), step)
    manager.wait_until_finished()
    return {"new": not resuming, "steps": manager.all_steps()}


def restore(directory: Path) -> Mapping[str, object]:
    """Resume, and restore the parameters alone."""
    from openpi.models import model
    from openpi.training import checkpoints

    manager, resuming = checkpoints.initialize_checkpoint_dir(
        directory / "run", keep_period=2, overwrite=False, resume=True
    )
    state = checkpoints.restore_state(manager, _state(9, 0), _loader())
    refused = None
    try:
        model.restore_params(directory / "run" / "3" / "params")
    except TypeError as error:  # it expects the metadata of an earlier Orbax
        refused = error
    return {
        "resuming": resuming,
        "state": [state.step, state.params, state.ema_params, state.opt_state],
        "refused": refused,
        "parameters": manager.restore(3, items={"params": None})["params"],
    }
