"""RecurrentGemma: its parameters, onto one device, onto all, and each as the caller says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.programs.program import Program
from tests.programs.surroundings import bare_package

PROGRAM = Program(
    "RecurrentGemma, `jax.utils`",
    repository="google-deepmind/recurrentgemma@2efa84dac0e68e63547a27a18fa943c98f1c312e",
    wheels=("jaxtyping==0.2.36", "typeguard==4.4.4"),
)


def _program() -> Any:
    bare_package("recurrentgemma", "recurrentgemma.jax")
    from recurrentgemma.jax import utils

    return utils


def _params() -> dict[str, Any]:
    block = {"kernel": jnp.arange(32, dtype=jnp.bfloat16).reshape(8, 4), "bias": jnp.zeros(8)}
    return {"embedder": {"input_embedding": jnp.ones((16, 4))}, "blocks.0": block, "scale": jnp.float32(2)}


def save(directory: Path) -> Mapping[str, object]:
    """Save them."""
    _program().save_parameters(str(directory / "params"), _params())
    return {"params": {"params": _params()}}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore them in all three ways, of which this Orbax takes the last only if a tree is given."""
    utils, path = _program(), str(directory / "params")
    mesh = Mesh(jax.devices(), "x")
    rows, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
    shardings = jax.tree.map(lambda leaf: rows if leaf.ndim else whole, {"params": _params()})
    found: dict[str, object] = {}
    for name, sharding in (("one", "single_device"), ("all", "replicated"), ("each", shardings)):
        try:
            found[name] = utils.load_parameters(path, sharding)
        except (ValueError, TypeError, AttributeError) as error:
            found[name] = error
    return found
