"""MaxText: the options of its checkpoints by the newer API, in a manager of that API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.programs.program import Program
from tests.programs.surroundings import bare_package

PROGRAM = Program(
    "MaxText, `common.checkpoint_context`",
    repository="AI-Hypercomputer/maxtext@e591f30cbbf217ed67ef71263ec0538239f9c3b8",
    path="src",
)


def _checkpointer(directory: Path, **options: Any) -> Any:
    bare_package("maxtext", "maxtext.common", "maxtext.utils")
    from maxtext.common import checkpoint_context
    from orbax.checkpoint import v1 as ocp

    return ocp.training.Checkpointer(
        str(directory / "run"),
        context=checkpoint_context.build_context(
            ocdbt_target_data_file_size_bytes=2**20, checkpoint_storage_concurrent_gb=8, **options
        ),
        save_decision_policy=checkpoint_context.build_save_decision_policy(save_interval_steps=2),
        preservation_policy=checkpoint_context.build_preservation_policy(max_to_keep=2),
    )


def _state(factor: float) -> Any:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    split: Any = PartitionSpec("data", "model")
    whole: Any = PartitionSpec()
    kernel = np.arange(64, dtype=np.float32).reshape(8, 8) * factor
    count = jax.device_put(np.int32(factor), NamedSharding(mesh, whole))
    return {
        "params": {"params": {"kernel": jax.device_put(kernel, NamedSharding(mesh, split))}},
        "opt_state": {"0": {"count": count}},
        "step": count + 1,
    }


def save(directory: Path) -> Mapping[str, object]:
    """Offer steps, of which every second is saved and two stay, some in the background."""
    found: dict[str, object] = {}
    with _checkpointer(directory, enable_continuous_checkpointing=True) as checkpointer:
        for step in range(7):
            if step < 4:
                found[f"saved {step}"] = checkpointer.save(step, _state(step))
            else:
                response = checkpointer.save_async(step, _state(step))
                found[f"saved {step}"] = response is not None and response.result()

        found["saved"] = [one.step for one in checkpointer.checkpoints]

    return found


def restore(directory: Path) -> Mapping[str, object]:
    """Load the latest, a part of a step, with more than is stored, and without a target."""
    import jax

    struct: Any = jax.ShapeDtypeStruct
    abstract = jax.tree.map(lambda one: struct(one.shape, one.dtype, sharding=one.sharding), _state(0.0))
    found: dict[str, object] = {}
    with _checkpointer(directory) as checkpointer:
        found["latest"] = checkpointer.load(abstract_state=abstract)
        found["4"] = checkpointer.load(4, abstract)
        found["as saved"] = checkpointer.load(4)
        try:
            checkpointer.load(4, {"params": abstract["params"]})
        except Exception as error:
            found["a part, refused"] = error

    with _checkpointer(directory, partial_load=True) as checkpointer:
        found["a part"] = checkpointer.load(4, {"params": abstract["params"]})
        found["more"] = checkpointer.load(4, {**abstract, "nnx_aux": {"count": abstract["step"]}})

    return found
