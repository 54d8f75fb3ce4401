"""JAX LLM examples: the weights of DeepSeek R1, onto the shardings that its rules give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tests.programs.program import Program, stand_in
from tests.programs.surroundings import bare_package

PROGRAM = Program(
    "JAX LLM examples, `deepseek_r1_jax`",
    repository="jax-ml/jax-llm-examples@8b4b24602e0652100e9835ec6d91fed58bbea472",
    path="deepseek_r1_jax",
)


def _program() -> Any:
    bare_package("deepseek_r1_jax")
    stand_in("deepseek_r1_jax.decode_ragged_dot")
    from deepseek_r1_jax import model

    return model


def _weights(model: Any, factor: int) -> Any:
    layers = [
        model.MLPLayer(
            w_gate=jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8) * factor,
            w_up=model.QuantArray(
                jnp.arange(64, dtype=jnp.int8).reshape(8, 8), jnp.full((8, 4), factor, jnp.float32)
            ),
            w_down=jnp.full((8, 8), factor * index, jnp.float8_e4m3fn),
        )
        for index in range(2)
    ]
    return {"layers": layers, "embedding": jnp.ones((16, 8)) * factor}


def save(directory: Path) -> Mapping[str, object]:
    """Save weights, some of them quantised."""
    model = _program()
    weights = _weights(model, 3)
    model.save_pytree(weights, directory / "weights")
    return {"leaves": jax.device_get(jax.tree.leaves(weights))}


def restore(directory: Path) -> Mapping[str, object]:
    """Load them as they were, and with a sharding for each."""
    model = _program()
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    rows: Any = PartitionSpec("x", "y")
    shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, rows), _weights(model, 1))
    placed = model.load_pytree(directory / "weights", shardings)
    found: dict[str, object] = {"placed": placed, "leaves": jax.device_get(jax.tree.leaves(placed))}
    try:
        found["plain"] = model.load_pytree(directory / "weights")
    except Exception as error:  # is compared
        found["plain error"] = error
    return found
