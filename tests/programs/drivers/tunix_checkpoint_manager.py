"""Tunix: the checkpoints of its fine-tuning, whole and of LoRA alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tests.programs.program import Program, stand_in

stand_in("datasets", "huggingface_hub", "kagglehub", "metrax", "pandas", "perfetto", "qwix", "sentencepiece")
stand_in("transformers", "numba", "jinja2", "yaml")
PROGRAM = Program("Tunix, `sft.checkpoint_manager`", wheels=("google-tunix==0.1.7",))


class Model(nnx.Module):
    """A layer with low ranks."""

    def __init__(self, seed: int) -> None:
        self.dense = nnx.LoRALinear(4, 8, lora_rank=2, rngs=nnx.Rngs(seed))


def _model(seed: int) -> tuple[Any, Any]:
    model = Model(seed)
    mesh = jax.make_mesh((8,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    nnx.update(model, jax.device_put(nnx.state(model), sharding))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)


def _leaves(module: Any, *kinds: Any) -> Any:
    return jax.tree.leaves(nnx.state(module, *kinds))


def _moments(optimizer: Any) -> Any:
    """Return what Tunix restores with the sharding that it had."""
    return [leaf for leaf in _leaves(optimizer, nnx.optimizer.OptState) if leaf.ndim]


def _manager(directory: Path) -> Any:
    from orbax import checkpoint
    from tunix.sft.checkpoint_manager import CheckpointManager

    options = checkpoint.CheckpointManagerOptions(max_to_keep=2)
    return CheckpointManager(str(directory), options)


def save(directory: Path) -> Mapping[str, object]:
    """Save a model with its optimizer, and another run of low ranks alone."""
    model, optimizer = _model(1)
    whole, low = _manager(directory / "whole"), _manager(directory / "low")
    saved = [
        *[whole.save(step, model, optimizer, custom_metadata={"loss": step}) for step in (1, 2, 3)],
        low.save(5, model, save_only_lora_params=True, force=True),
    ]
    whole.close()
    low.close()
    return {"saved": saved, "model": _leaves(model), "moments": _moments(optimizer)}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore them into other models, and a run that has nothing yet."""
    model, optimizer = _model(2)
    other, _ = _model(3)
    manager = _manager(directory / "whole")
    return {
        "latest": manager.latest_step(),
        "step": manager.maybe_restore(model, optimizer),
        "model": _leaves(model),
        "moments": _moments(optimizer),
        "optimizer": _leaves(optimizer, nnx.optimizer.OptState),
        "low step": _manager(directory / "low").maybe_restore(other, restore_only_lora_params=True),
        "low": _leaves(other),
        "nothing": _manager(directory / "empty").maybe_restore(other),
    }
