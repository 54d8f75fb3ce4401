"""Parameters of a policy with a file of settings beside them, as brax's training checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.training import orbax_utils

_jnp: Any = jnp


def train(ocp: Any, directory: str) -> Any:
    """Save (normaliser, policy, value) for two steps, each twice, as a job that was restarted does."""
    checkpointer = ocp.PyTreeCheckpointer()
    for step in (10, 20, 20):
        params = ({"mean": np.zeros(3), "count": step}, {"w": _jnp.full((2, 2), step)}, {"w": _jnp.ones(2)})
        path = Path(directory) / f"{step:012d}"
        checkpointer.save(path, params, force=True, save_args=orbax_utils.save_args_from_target(params))
        (path / "network.json").write_text(json.dumps({"hidden": [2, 2]}))
    return sorted(path.name for path in Path(directory).iterdir())


def resume(ocp: Any, directory: str) -> Any:
    """Restore the latest without a target, as the tuple that it was."""
    latest = max(path for path in Path(directory).iterdir() if path.is_dir())
    found = ocp.PyTreeCheckpointer().restore(latest)
    return {"params": tuple(found), "settings": json.loads((latest / "network.json").read_text())}
