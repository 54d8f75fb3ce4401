"""A flax `TrainState` kept by a manager in the older style, as in flax's page on checkpoints."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import orbax_utils, train_state

_jnp: Any = jnp


def initial() -> Any:
    """A state before training."""
    model = nn.Dense(3)
    params: Any = model.init(jax.random.key(0), _jnp.ones((1, 4)))["params"]
    state: Any = train_state.TrainState
    return state.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))


def train(ocp: Any, directory: str) -> Any:
    """Train for five steps, keep two of them."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    manager = ocp.CheckpointManager(directory, ocp.PyTreeCheckpointer(), options)
    state = initial()
    for step in range(5):
        state = state.apply_gradients(grads=jax.tree.map(_jnp.ones_like, state.params))
        bundle = {"model": state, "config": {"width": 3, "name": "dense"}, "data": [_jnp.arange(3)]}
        save_args = orbax_utils.save_args_from_target(bundle)
        manager.save(step, bundle, save_kwargs={"save_args": save_args})
    return {"steps": list(manager.all_steps()), "params": state.params}


def resume(ocp: Any, directory: str) -> Any:
    """Restore the latest step, once as it is and once as a state."""
    manager = ocp.CheckpointManager(directory, ocp.PyTreeCheckpointer())
    step = manager.latest_step()
    plain = manager.restore(step)
    target = {"model": initial(), "config": {"width": 0, "name": ""}, "data": [_jnp.zeros(3, int)]}
    restored = manager.restore(
        step, items=target, restore_kwargs={"restore_args": orbax_utils.restore_args_from_target(target)}
    )
    return {
        "plain": plain["model"]["params"],
        "config": plain["config"],
        "step": int(restored["model"].step),
        "opt": jax.tree.leaves(restored["model"].opt_state),
        "data": restored["data"],
    }
