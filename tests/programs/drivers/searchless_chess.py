"""Searchless chess: asynchronous checkpointers of standard trees next to an iterator of Grain."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from tests.programs.program import Program, stand_in

stand_in("haiku", "apache_beam", "jaxtyping")
PROGRAM = Program(
    "Searchless chess, `training_utils`",
    repository="google-deepmind/searchless_chess@90ae0e6b121673fc3079aaeffa047580bb600c0a",
    wheels=("grain==0.2.18", "array-record==0.8.3", "cloudpickle==3.1.2"),
)


class _OnAll:
    """What jax has for `PositionalSharding` no more."""

    def replicate(self) -> NamedSharding:
        spec: Any = PartitionSpec
        return NamedSharding(jax.make_mesh((8,), ("x",)), spec())


def _program() -> Any:
    jax.sharding.PositionalSharding = _OnAll  # type: ignore[attr-defined]  # jax removed it
    # Its repository is its package.
    package = ModuleType("searchless_chess")
    package.__path__ = [path for path in sys.path if path.endswith("searchless_chess")]
    sys.modules["searchless_chess"] = package
    stand_in("searchless_chess.src.config")
    from searchless_chess.src import training_utils

    return training_utils


def _trees(step: int) -> tuple[Any, Any, Any]:
    params = {"linear": {"w": jnp.arange(16.0).reshape(8, 2) * step, "b": jnp.full(2, step, jnp.bfloat16)}}
    params = jax.device_put(params, _OnAll().replicate())
    return params, jax.tree.map(lambda leaf: leaf / 2, params), optax.adamw(0.1).init(params)


def _data() -> Any:
    import grain.python as grain

    source: Any = range(60)
    sampler = grain.IndexSampler(60, shard_options=grain.NoSharding(), shuffle=True, num_epochs=1, seed=5)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0))


def _manager(directory: Path) -> Any:
    return _program().get_checkpoint_manager(
        ckpt_frequency=2, max_to_keep=2, save_frequency=6, checkpoint_dir=str(directory)
    )


def save(directory: Path) -> Mapping[str, object]:
    """Save every second step, of which two and each sixth stay."""
    manager, data = _manager(directory), _data()
    for step in range(14):
        next(data)
        names = ("params", "params_ema", "opt_state")
        manager.save(step, items={**dict(zip(names, _trees(step), strict=True)), "data_iter": data})
    manager.close()
    params, average, _ = _trees(12)
    rest = [int(one) for one in data]
    moved = jax.tree.map(np.asarray, average)
    return {"steps": manager.all_steps(), "params": params, "ema": moved, "rest": rest}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore the latest step as training does, and parameters alone as an agent does.

    Without a step the agent takes the last of `checkpoint_steps`, which Orbax does not sort.
    """
    program, manager = _program(), _manager(directory)
    found: dict[str, object] = {"steps": manager.all_steps()}
    params, average, optimizer, data = program.restore_checkpoint(
        manager, manager.latest_step(), *_trees(1), _data(), _OnAll()
    )
    found |= {"params": params, "ema": jax.tree.map(np.asarray, average), "optimizer": optimizer}
    next(data)
    found["rest"] = [int(one) for one in data]
    for name, options in {"latest": {"step": 12}, "average": {"step": 6, "use_ema_params": True}}.items():
        found[name] = program.load_parameters(_trees(1)[0], checkpoint_dir=str(directory), **options)
    try:
        program.load_parameters(params, step=7, checkpoint_dir=str(directory))
    except FileNotFoundError as error:
        found["absent"] = error
    return found
