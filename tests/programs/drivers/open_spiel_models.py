"""OpenSpiel: the networks of AlphaZero, of linen and of NNX, and the agent of DQN."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from tests.programs.program import Program, stand_in
from tests.programs.surroundings import bare_package

PROGRAM = Program(
    "OpenSpiel, `alpha_zero` and `dqn`",
    repository="google-deepmind/open_spiel@112b77704631fc2ce7ad8e4581f6ca09798ce15a",
    devices=1,
)


def _module(name: str) -> Any:
    stand_in("pyspiel")
    bare_package("open_spiel", "open_spiel.python", "open_spiel.python.algorithms")
    bare_package("open_spiel.python.algorithms.alpha_zero", "open_spiel.python.jax")
    return import_module(f"open_spiel.python.{name}")


def _model(kind: str, directory: Path, seed: int) -> Any:
    return _module(f"algorithms.alpha_zero.model_{kind}").Model.build_model(
        "resnet",
        (4, 4, 2),
        output_size=3,
        nn_width=4,
        nn_depth=1,
        weight_decay=0.01,
        learning_rate=0.1,
        path=str(directory / kind),
        seed=seed,
    )


def _agent(seed: int) -> Any:
    dqn = _module("jax.dqn")
    return dqn.DQN(0, state_representation_size=4, num_actions=3, hidden_layers_sizes=[8], seed=seed)


def _arrays(state: Any) -> Mapping[str, object]:
    return {name: getattr(state, name) for name in ("step", "params", "opt_state", "batch_stats")}


def _weights(agent: Any) -> object:
    return jax.tree.leaves(nnx.state((agent._q_network, agent._optimizer)))


def save(directory: Path) -> Mapping[str, object]:
    """Save each network twice in one place, and an agent with its optimizer and without."""
    found: dict[str, object] = {}
    for kind in ("linen", "nnx"):
        for seed in (1, 2):
            model = _model(kind, directory, seed)
            model.save_checkpoint(5)
        found[kind] = _arrays(model._state)

    agent = _agent(1)
    agent.save(str(directory / "agent"))
    agent.save(str(directory / "agent"), save_optimiser=False)
    return {**found, "agent": _weights(agent)}


def restore(directory: Path) -> Mapping[str, object]:
    """Load each into another one."""
    found: dict[str, object] = {}
    for kind in ("linen", "nnx"):
        model = _model(kind, directory, 3)
        try:
            model.load_checkpoint(5)
        except Exception as error:  # is compared
            found[f"{kind} error"] = error
        else:
            state = model._state
            found[f"{kind} loaded"] = state if isinstance(state, dict) else _arrays(state)

    agent, other = _agent(2), _agent(3)
    agent.load(str(directory / "agent"))
    other.load(str(directory / "agent"), load_optimiser=False)
    return {**found, "agent": _weights(agent), "network": jax.tree.leaves(nnx.state(other._q_network))}
