"""An equinox model: its arrays are saved, its functions are not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp

import penstock


def build(seed: int) -> eqx.nn.MLP:
    """Make a model."""
    return eqx.nn.MLP(in_size=4, out_size=2, width_size=16, depth=2, key=jax.random.key(seed))


def main(directory: Path) -> None:
    """Save the arrays of a model, restore them into another one."""
    model = build(0)
    penstock.sync.save(directory / "model", eqx.filter(model, eqx.is_array))

    arrays, rest = eqx.partition(build(1), eqx.is_array)
    restored = eqx.combine(penstock.sync.restore(directory / "model", like=arrays), rest)
    x = jnp.arange(4.0)
    assert jnp.array_equal(restored(x), model(x))
    print("both models agree")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
