"""The state of an NNX model, restored onto its abstract shape, as in flax's page on NNX checkpoints."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

_nnx: Any = nnx


def _model(seed: int) -> Any:
    return _nnx.Linear(4, 3, rngs=_nnx.Rngs(seed))


def train(ocp: Any, directory: str) -> Any:
    """Save a model's state, and the pure dict of it."""
    _, state = _nnx.split(_model(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{directory}/state", state)
        checkpointer.save(f"{directory}/dict", _nnx.to_pure_dict(state))
    return _nnx.to_pure_dict(state)


def resume(ocp: Any, directory: str) -> Any:
    """Restore both into a model that was made without memory."""
    definition, abstract = _nnx.split(_nnx.eval_shape(lambda: _model(1)))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(f"{directory}/state", abstract)
        pure = checkpointer.restore(f"{directory}/dict")
    model = _nnx.merge(definition, state)
    return {"y": model(jax.numpy.ones((1, 4))), "pure": pure}
