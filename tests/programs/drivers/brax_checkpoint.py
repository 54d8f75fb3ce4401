"""brax: the parameters of a PPO agent, as its training saves them and its examples load them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tests.programs.program import Program, stand_in

stand_in("mujoco", "brax.envs", "brax.io", "jaxopt", "trimesh", "tensorboardX", "pytinyrenderer")
PROGRAM = Program("brax, `training.checkpoint`", wheels=("brax==0.14.2", "ml_collections==1.1.0"))


def _params() -> Any:
    from brax.training import types
    from brax.training.acme import running_statistics
    from brax.training.agents.ppo import networks

    made = networks.make_ppo_networks(5, 2, policy_hidden_layer_sizes=(4,), value_hidden_layer_sizes=(3,))
    observed = running_statistics.init_state(jax.ShapeDtypeStruct((5,), jnp.float32))
    policy, value = made.policy_network.init(jax.random.key(1)), made.value_network.init(jax.random.key(2))
    assert isinstance(observed.count, types.UInt64 | jax.Array)
    return observed, policy, value


def save(directory: Path) -> Mapping[str, object]:
    """Save twice, the second time over the first."""
    from brax.training import checkpoint
    from brax.training.agents.ppo import networks

    config = checkpoint.network_config(5, 2, True, networks.make_ppo_networks)
    for name in ("mean_kernel_init_fn",):  # which brax writes as null, and does not read
        del config.network_factory_kwargs[name]
    for _ in range(2):
        checkpoint.save(directory, 7, _params(), config)

    return {"weights": list(_params()[1:])}


def restore(directory: Path) -> Mapping[str, object]:
    """Load the parameters, as NumPy arrays, and the configuration."""
    from brax.training import checkpoint

    path = directory / f"{7:012d}"
    params = checkpoint.load(path)
    return {
        "statistics": params[0],
        "networks": params[1:],
        "config": sorted(checkpoint.load_config(path / "config.json").network_factory_kwargs),
    }
