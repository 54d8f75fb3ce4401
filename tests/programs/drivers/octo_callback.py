"""Octo: the callback that saves its training, and the model that is loaded from it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.programs.program import Program, stand_in
from tests.programs.surroundings import bare_package, local_gfile

PROGRAM = Program(
    "Octo, `SaveCallback` and `load_pretrained`",
    repository="octo-models/octo@241fb3514b7c40957a86d869fecb7c7fc353f540",
)


def _program() -> tuple[Any, Any, Any]:
    import jax as jax_of_today

    jax: Any = jax_of_today
    local_gfile()
    stand_in("tqdm", "ml_collections")
    bare_package("octo", "octo.model", "octo.utils")
    stand_in("octo.data", "octo.data.utils", "octo.data.dataset", "octo.data.utils.text_processing")
    stand_in("octo.data.utils.data_utils", "octo.model.components", "octo.model.components.action_heads")
    stand_in("octo.utils.visualization_lib")
    utils: Any = sys.modules["octo.data.utils.data_utils"]
    utils.NormalizationType = type("NormalizationType", (), {"NORMAL": "normal", "BOUNDS": "bounds"})
    jax.random.KeyArray = jax.Array  # jax had these names when Octo was written
    jax.tree_map = jax.tree.map
    sys.modules["octo.model.octo_module"] = _small_module()

    from octo.model.octo_model import OctoModel
    from octo.utils.train_callbacks import SaveCallback
    from octo.utils.train_utils import TrainState

    return OctoModel, SaveCallback, TrainState


def _small_module() -> ModuleType:
    import flax.linen as nn

    class OctoModule(nn.Module):
        """A network of two layers in the place of Octo's transformer."""

        width: int

        @nn.compact
        def __call__(self, observation: Any, task: Any, mask: Any, train: bool = False) -> Any:
            hidden = nn.Dense(self.width)(observation["image"]) + nn.Dense(self.width)(task["goal"])
            return nn.LayerNorm()(hidden) * mask[..., None]

        @classmethod
        def create(cls, *, width: int, heads: Any) -> OctoModule:
            return cls(width)

    module = ModuleType("octo.model.octo_module")
    module.OctoModule = OctoModule  # type: ignore[attr-defined]
    return module


def _state(step: int) -> Any:
    import jax
    import numpy as np
    import optax

    octo_model, _, train_state = _program()
    config = {"model": {"width": 8, "heads": {"action": {"kwargs": {}}}}, "text_processor": None}
    batch = {
        "observation": {"image": np.ones((1, 4), np.float32), "timestep_pad_mask": np.ones(1, np.float32)},
        "task": {"goal": np.ones((1, 3), np.float32)},
    }
    rng = jax.random.PRNGKey(step)
    statistics = {"action": {"mean": np.arange(3.0), "std": np.ones(3)}}
    model = octo_model.from_config(config, batch, rng=rng, dataset_statistics=statistics)
    return train_state.create(rng, model, optax.adamw(1e-3)).replace(step=step)


def save(directory: Path) -> Mapping[str, object]:
    """Call the callback for three steps: every model stays, and the last state."""
    _, save_callback, _ = _program()
    callback = save_callback(str(directory / "run"))
    for step in (1, 2, 3):
        callback(_state(step), step)

    callback.state_checkpointer.wait_until_finished()
    callback.params_checkpointer.wait_until_finished()
    return {
        "models": callback.params_checkpointer.all_steps(),
        "states": callback.state_checkpointer.all_steps(),
    }


def restore(directory: Path) -> Mapping[str, object]:
    """Load models as a user does, and the state as training does."""
    import orbax.checkpoint

    octo_model, _, _ = _program()
    latest = octo_model.load_pretrained(str(directory / "run"))
    second = octo_model.load_pretrained(str(directory / "run"), step=2)
    manager = orbax.checkpoint.CheckpointManager(
        directory / "run" / "state", orbax.checkpoint.PyTreeCheckpointer()
    )
    restored: Any = manager.restore(manager.latest_step(), items=_state(0))
    return {
        "latest": latest.params,
        "second": second.params,
        "statistics": latest.dataset_statistics,
        "state": restored.opt_state,
    }
