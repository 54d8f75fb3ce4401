"""flax: the example of NNX that saves and loads a model."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from tests.programs.program import Program

PROGRAM = Program(
    "flax, `examples/nnx_toy_examples`",
    repository="google/flax@18f8f311c275d57f46d95e41b15aa97b454754c0",
    path="examples/nnx_toy_examples",
)


def _example() -> Mapping[str, Any]:
    return runpy.run_module("08_save_load_checkpoints")


def save(directory: Path) -> Mapping[str, object]:
    """Save the model of the example."""
    example = _example()
    example["create_and_save"](42, str(directory))
    return {"weights": jax.tree.leaves(nnx.state(example["create_model"](42)))}


def restore(directory: Path) -> Mapping[str, object]:
    """Load it into a model of abstract arrays."""
    model = _example()["load_model"](str(directory))
    return {"weights": jax.tree.leaves(nnx.state(model)), "state": nnx.state(model).to_pure_dict()}
