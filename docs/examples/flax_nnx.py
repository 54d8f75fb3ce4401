"""A flax NNX model with its optimizer: the state is split off, saved, and put into a new model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import penstock


class Net(nnx.Module):
    """Two layers, one of which drops out: so there are parameters and the state of a random key."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one number for each row."""
        return self.second(self.dropout(nnx.relu(self.first(x))))


@nnx.jit
def train(net: Net, optimizer: nnx.Optimizer[Net], x: jax.Array) -> None:
    """One step, in place."""
    gradients = nnx.grad(lambda model: jnp.mean((model(x) - 1.0) ** 2))(net)
    optimizer.update(net, gradients)


def build(seed: int) -> tuple[Net, nnx.Optimizer[Net]]:
    """Make a model and its optimizer."""
    net = Net(nnx.Rngs(seed))
    return net, nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)


def main(directory: Path) -> None:
    """Train, save, restore into another model, and train both on."""
    x = jnp.ones((8, 4))
    pair = build(0)
    for _ in range(3):
        train(*pair, x)

    penstock.sync.save(directory / "state", nnx.state(pair))

    other = build(1)
    nnx.update(other, penstock.sync.restore(directory / "state", like=nnx.state(other)))
    train(*pair, x)
    train(*other, x)  # dropout included: the random state was restored, too
    for ours, theirs in zip(jax.tree.leaves(nnx.state(other)), jax.tree.leaves(nnx.state(pair)), strict=True):
        assert jnp.array_equal(jax.random.key_data(ours) if _is_key(ours) else ours, _plain(theirs))

    print("both models agree")


def _is_key(value: jax.Array) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _plain(value: jax.Array) -> jax.Array:
    return jax.random.key_data(value) if _is_key(value) else value


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
