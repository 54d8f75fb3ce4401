"""A flax linen model in a TrainState, whose functions are not saved and not needed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import penstock


class Net(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one number for each row."""
        return nn.Dense(1)(nn.relu(nn.Dense(16)(x)))


@jax.jit
def train(state: TrainState, x: jax.Array) -> TrainState:
    """One step."""
    gradients = jax.grad(lambda params: jnp.mean((state.apply_fn(params, x) - 1.0) ** 2))(state.params)
    return state.apply_gradients(grads=gradients)


def build(seed: int, x: jax.Array) -> TrainState:
    """Make a model and its optimizer."""
    net = Net()
    return TrainState.create(
        apply_fn=net.apply, params=net.init(jax.random.key(seed), x), tx=optax.adam(1e-2)
    )


def main(directory: Path) -> None:
    """Train, save, restore, and train both on."""
    x = jnp.ones((8, 4))
    state = build(0, x)
    for _ in range(3):
        state = train(state, x)

    penstock.sync.save(directory / "state", state)

    restored = penstock.sync.restore(directory / "state", like=build(1, x))
    assert int(restored.step) == 3
    for ours, theirs in zip(
        jax.tree.leaves(train(restored, x)), jax.tree.leaves(train(state, x)), strict=True
    ):
        assert jnp.array_equal(ours, theirs)

    # Weights alone, say for a server: of all that was saved, only they are read.
    params = penstock.sync.restore(
        directory / "state", like={"params": build(1, x).params}, on_unexpected="skip"
    )["params"]
    assert jnp.array_equal(Net().apply(params, x), state.apply_fn(state.params, x))
    print("the restored state trains on, and its weights serve")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
