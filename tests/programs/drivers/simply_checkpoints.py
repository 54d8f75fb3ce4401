"""Simply: checkpoints that name their format, read by the handlers that they name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.programs.program import Program

PROGRAM = Program(
    "Simply, `checkpoint_lib`",
    repository="google-deepmind/simply@e14c06121fd9c5967051f0956fb4a84ad84a551c",
    wheels=("einops==0.8.1", "deprecated==1.2.18", "wrapt==1.17.2"),
)


def _state(factor: float) -> Any:
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec
    from simply.utils import sharding

    mesh = sharding.create_mesh()
    whole: Any = PartitionSpec()
    place = jax.sharding.NamedSharding(mesh, whole)
    params = {
        "embed": {"w": np.arange(64, dtype=np.float32).reshape(8, 8) * factor},
        "block_0": {"ffn": {"w": np.full((8, 16), factor, np.float32), "b": np.zeros(16, np.float32)}},
    }
    tree = {"params": params, "m": jax.tree.map(np.ones_like, params), "steps": np.int32(3)}
    return jax.device_put(tree, place)


def save(directory: Path) -> Mapping[str, object]:
    """Save in two formats, with the state of the data, and without a format as another program does."""
    import orbax.checkpoint as ocp
    from simply.utils import checkpoint_lib

    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(directory / "run", options=options) as manager:
        for step in (1, 2, 3):
            checkpoint_lib.save_checkpoint(manager, _state(step), step, data={"records": step * 10})
    with ocp.CheckpointManager(directory / "other") as manager:
        manager.save(0, args=ocp.args.StandardSave(_state(5.0)))

    return {"last": checkpoint_lib.last_checkpoint_step(str(directory / "run"))}


def restore(directory: Path) -> Mapping[str, object]:
    """Load them, a state that has less, and one that has more."""
    import jax
    from simply.utils import checkpoint_lib

    def load(name: str, target: Any) -> Any:
        struct: Any = jax.ShapeDtypeStruct
        abstract = jax.tree.map(lambda one: struct(one.shape, one.dtype, sharding=one.sharding), target)
        return checkpoint_lib.load_checkpoint_from_dir(str(directory / name), abstract)

    whole = _state(0.0)
    return {
        "run": load("run", whole),
        "other": load("other", whole),
        "params alone": load("run", {"params": whole["params"]}),
        "data": checkpoint_lib.load_data_state_from_dir(str(directory / "run"), 3),
        "manager": checkpoint_lib.load_checkpoint_from_manager(
            checkpoint_lib.readonly_checkpoint_manager(str(directory / "run")), whole
        ),
        "handler": type(
            checkpoint_lib.resolve_checkpoint_handler_from_path(str(directory / "run" / "3"))
        ).__name__,
    }
