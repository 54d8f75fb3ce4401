"""Gemma: the loader of its published parameters, nested and flat, and of those of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from tests.programs.program import Program, stand_in

stand_in("IPython", "PIL", "kagglehub", "kauldron", "sentencepiece", "tensorflow", "tensorflow_datasets")
PROGRAM = Program("Gemma, `gm.ckpts`", wheels=("gemma==3.3.0", "einops==0.8.1"))


def _nested(offset: int) -> Any:
    weights = jnp.arange(8, dtype=jnp.bfloat16).reshape(2, 4) + offset
    return {"embedder": {"input_embedding": weights}, "layer_0": {"attn": {"q_einsum": {"w": weights + 1}}}}


def _flat() -> Any:
    return {
        "transformer/embedder": {"input_embedding": jnp.ones((4, 2), jnp.bfloat16)},
        "transformer/layer_0/attn/q_einsum": {"w": jnp.arange(8, dtype=jnp.bfloat16)},
    }


def _ckpts() -> Any:
    """Return its module. Of Kauldron it asks for the sharding that has all of an array everywhere."""
    from gemma.gm.ckpts import _checkpoint as ckpts

    mesh = jax.make_mesh((8,), ("x",))
    ckpts.kd = SimpleNamespace(sharding=SimpleNamespace(REPLICATED=NamedSharding(mesh, PartitionSpec())))
    return ckpts


def save(directory: Path) -> Mapping[str, object]:
    """Save parameters by the library, and as they were published."""
    from orbax import checkpoint

    _ckpts().save_params(_nested(1), directory / "nested", wait_until_finished=True)
    saver = checkpoint.StandardCheckpointer()
    saver.save(directory / "flat", _flat())
    saver.wait_until_finished()
    return {"parameters": _nested(1)}


def restore(directory: Path) -> Mapping[str, object]:
    """Load them with and without a model's."""
    ckpts = _ckpts()
    return {
        "parameters": ckpts.load_params(directory / "nested", params=_nested(0)),
        "as published": ckpts.load_params(directory / "flat"),
        "replicated": ckpts.load_params(directory / "nested"),
        "text alone": ckpts.load_params(directory / "nested", text_only=True),
    }
