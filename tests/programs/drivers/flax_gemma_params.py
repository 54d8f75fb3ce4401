"""flax: the example `gemma`, which loads published parameters and resumes its training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tests.programs.program import Program

PROGRAM = Program(
    "flax, the parameters of `examples/gemma`",
    repository="google/flax@18f8f311c275d57f46d95e41b15aa97b454754c0",
    path="examples/gemma",
)


def _published() -> Any:
    return {
        "transformer/embedder": {"input_embedding": jnp.ones((4, 2), jnp.bfloat16)},
        "transformer/layer_0/attn/q_einsum": {"w": jnp.arange(8, dtype=jnp.bfloat16).reshape(2, 4)},
        "transformer/layer_0/mlp/linear": {"w": jnp.arange(6.0).reshape(2, 3)},
    }


def save(directory: Path) -> Mapping[str, object]:
    """Save parameters as they are published."""
    from orbax import checkpoint

    checkpoint.PyTreeCheckpointer().save(directory / "published", _published())
    return {"parameters": _published()}


def restore(directory: Path) -> Mapping[str, object]:
    """Load them, describe them, and bring them into the form of the model."""
    import params

    path = str(directory / "published")
    described = params.load_metadata(path)
    return {
        "parameters": params.load_params(path),
        "formatted": params.load_and_format_params(path),
        "described": sorted(dict(described.item_metadata.tree)),
    }
