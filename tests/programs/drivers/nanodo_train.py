"""NanoDO: the manager of its training, with a data iterator of Grain in each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from tests.programs.program import Program, stand_in

stand_in(
    "clu", "ml_collections", "seqio", "sentencepiece", "tensorflow", "tensorflow_datasets", "nanodo.data"
)
PROGRAM = Program(
    "NanoDO, `train`",
    wheels=("grain==0.2.18", "array-record==0.8.3", "cloudpickle==3.1.2"),
    repository="google-deepmind/nanodo@10aefdeed40a63293daf112b91a5538cd24fa3a4",
)


def _state(offset: int) -> Any:
    mesh = jax.make_mesh((8,), ("data",))
    rows = jax.device_put(jnp.arange(16.0) + offset, NamedSharding(mesh, PartitionSpec("data")))
    state: Any = TrainState.create(apply_fn=None, params={"rows": rows}, tx=optax.adamw(0.1))
    return state.replace(step=jnp.asarray(offset))


def _data() -> Any:
    import grain.python as grain

    source: Any = range(40)
    sampler = grain.IndexSampler(40, shard_options=grain.NoSharding(), shuffle=True, num_epochs=1, seed=3)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0))


def _manager(directory: Path) -> Any:
    from nanodo import train

    config: Any = SimpleNamespace(max_to_keep=2)
    return train._get_ckpt_manager(str(directory), config)


def save(directory: Path) -> Mapping[str, object]:
    """Save as the loop of the training does."""
    manager, data = _manager(directory), _data()
    for step in range(3):
        next(data)
        manager.save(step, items={"state": _state(step), "data": data})
    manager.close()
    return {"steps": manager.all_steps(), "state": _state(2), "next": int(next(data))}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore the latest step, and the one before."""
    from nanodo import train

    manager = _manager(directory)
    state, data = train._restore_ckpt(manager, _state(7), _data())
    earlier, _ = train._restore_ckpt(manager, _state(7), _data(), step=1)
    return {"state": state, "next": int(next(data)), "earlier": earlier}
