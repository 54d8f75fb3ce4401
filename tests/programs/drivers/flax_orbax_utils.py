"""flax: `flax.training.orbax_utils`, as its guide on saving uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tests.programs.program import Program

PROGRAM = Program("flax, `training.orbax_utils`", wheels=("flax==0.12.8",))


def _tree(offset: int) -> Any:
    mesh = jax.make_mesh((8,), ("x",))
    rows = jax.device_put(jnp.arange(16.0) + offset, NamedSharding(mesh, PartitionSpec("x")))
    return {"config": {"rate": 0.5 + offset}, "model": {"rows": rows, "scale": jnp.ones((), jnp.float16)}}


def _manager(directory: Path) -> Any:
    from orbax import checkpoint

    options = checkpoint.CheckpointManagerOptions(max_to_keep=2, create=True)
    return checkpoint.CheckpointManager(directory / "managed", checkpoint.PyTreeCheckpointer(), options)


def save(directory: Path) -> Mapping[str, object]:
    """Save with a checkpointer, and steps with a manager."""
    from flax.training import orbax_utils
    from orbax import checkpoint

    saver = checkpoint.PyTreeCheckpointer()
    saver.save(directory / "one", _tree(0), save_args=orbax_utils.save_args_from_target(_tree(0)))
    manager = _manager(directory)
    for step in range(4):
        arguments = orbax_utils.save_args_from_target(_tree(step))
        manager.save(step, _tree(step), save_kwargs={"save_args": arguments})

    return {"steps": manager.all_steps(), "tree": _tree(0)}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore onto one device and onto others, and drop what is no longer wanted."""
    from flax.training import orbax_utils
    from orbax import checkpoint

    reader = checkpoint.PyTreeCheckpointer()
    target = _tree(7)
    arguments = orbax_utils.restore_args_from_target(target)
    manager = _manager(directory)
    partial = {"model": {"rows": target["model"]["rows"]}}
    return {
        "tree": reader.restore(directory / "one", item=target, restore_args=arguments),
        "as saved": reader.restore(directory / "one"),
        "step": manager.restore(manager.latest_step()),
        "step of a target": manager.restore(
            2, items=target, restore_kwargs={"restore_args": orbax_utils.restore_args_from_target(target)}
        ),
        "part": reader.restore(
            directory / "one",
            item=partial,
            transforms={},
            restore_args=orbax_utils.restore_args_from_target(partial),
        ),
    }
