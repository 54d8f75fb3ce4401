"""A loop that begins where it was interrupted, in the newer API, as in Orbax's page on training."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

_jax: Any = jax


def _run(ocp: Any, directory: str, until: int) -> Any:
    training = ocp.v1.training
    state = {"w": _jax.numpy.zeros(4), "at": np.arange(2), "step": 0}
    with training.Checkpointer(
        directory,
        save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(2),
        preservation_policy=training.preservation_policies.LatestN(2),
    ) as checkpointer:
        if checkpointer.latest is not None:
            state = checkpointer.load(abstract_state=state)
        for step in range(state["step"], until):
            state = {"w": state["w"] + step, "at": state["at"] + 1, "step": step + 1}
            checkpointer.save(step + 1, state, metrics={"loss": 1 / (step + 1)})
        return {"state": state, "steps": [(found.step, found.metrics) for found in checkpointer.checkpoints]}


def train(ocp: Any, directory: str) -> Any:
    """Run five steps of ten, of which the last is not saved."""
    return _run(ocp, directory, 5)


def resume(ocp: Any, directory: str) -> Any:
    """Run the rest."""
    return _run(ocp, directory, 10)
