"""Several seeds trained at once by vmap, and the best of them restored alone, as PureJaxRL's scripts do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training import orbax_utils
from flax.training.train_state import TrainState

_jax: Any = jax
_jnp: Any = jnp
_State: Any = TrainState
SEEDS = 3


def _start(key: Any) -> Any:
    params = {"actor": {"w": _jax.random.normal(key, (2, 2))}, "critic": {"w": _jnp.ones(2)}}
    return _State.create(apply_fn=None, params=params, tx=optax.sgd(1e-2, momentum=0.9))


def _one_seed(key: Any) -> tuple[Any, Any]:
    def update(state: Any, _: Any) -> tuple[Any, Any]:
        grads = _jax.tree.map(_jnp.sin, state.params)
        return state.apply_gradients(grads=grads), _jnp.sum(state.params["actor"]["w"])

    return _jax.lax.scan(update, _start(key), None, length=4)  # type: ignore[no-any-return]


_train_all = _jax.jit(_jax.vmap(_one_seed))


def train(ocp: Any, directory: str) -> Any:
    """Train all seeds, and save their states and what each earned."""
    states, earned = _train_all(_jax.random.split(_jax.random.key(0), SEEDS))
    out = {"runner_state": {"train_state": states, "step": 4}, "metrics": {"returned": earned}}
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(Path(directory) / "run", out, save_args=orbax_utils.save_args_from_target(out))
    return earned


def resume(ocp: Any, directory: str) -> Any:
    """Restore without a target, choose the best seed, and go on with it as a state of its own."""
    found = ocp.PyTreeCheckpointer().restore(Path(directory) / "run")
    best = int(_jnp.argmax(found["metrics"]["returned"][:, -1]))
    params = _jax.tree.map(lambda leaf: leaf[best], found["runner_state"]["train_state"]["params"])
    state = _start(_jax.random.key(0)).replace(params=_jax.tree.map(_jnp.asarray, params))
    return {"best": best, "step": found["runner_state"]["step"], "params": state.params}
