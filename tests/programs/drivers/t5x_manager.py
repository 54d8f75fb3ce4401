"""T5X: its manager over Orbax's, which chooses the steps to delete by metrics from TensorBoard's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tests.programs.program import Program, stand_in
from tests.programs.surroundings import bare_package, local_gfile

PROGRAM = Program(
    "T5X, `OrbaxCheckpointManagerInterface`",
    repository="google-research/t5x@cc342d419ec3e3e9c4bf1df33c82330cafdc1e16",
    wheels=("gin-config==0.5.0", "cached-property==2.0.1"),
)

_ACCURACY = {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.2, 5: 0.3}


def _program() -> Any:
    local_gfile()
    stand_in("clu", "clu.data", "clu.data.dataset_iterator", "jestimator", "jestimator.amos")
    stand_in("jestimator.amos_helper", "tensorboard", "tensorboard.backend")
    stand_in("tensorboard.backend.event_processing")
    for name in ("directory_watcher", "event_file_loader", "io_wrapper"):
        stand_in(f"tensorboard.backend.event_processing.{name}")

    bare_package("t5x")
    from t5x import checkpoints

    # The events of TensorBoard are not here; what T5X reads from them is.
    checkpoints.populate_metrics_for_steps = lambda _directory, _name, steps: {
        step: _ACCURACY[step] for step in steps if step in _ACCURACY and step < 5
    }
    return checkpoints


def _state(step: int) -> tuple[Any, Any]:
    import jax
    import numpy as np
    import optax
    from flax.core import freeze
    from jax.sharding import NamedSharding, PartitionSpec
    from t5x import optimizers, partitioning, train_state

    axes = {"params_axes": {"dense": {"kernel_axes": _axes("embed", "mlp"), "bias_axes": _axes("mlp")}}}
    kernel = np.arange(32, dtype=np.float32).reshape(4, 8) + step
    params = {"dense": {"kernel": kernel, "bias": np.full(8, step, np.float32)}}
    rules = [("embed", None), ("mlp", "model"), ("batch", "data")]
    partitioner = partitioning.PjitPartitioner(num_partitions=2, logical_axis_rules=rules)
    optimizer = optimizers.wrap_optax_optimizer(optax.adam)(1e-3)
    state = train_state.FlaxOptimTrainState.create(optimizer, freeze({"params": params, **axes}))
    state = state.replace_step(np.int32(step))
    replicated: Any = cast("Any", PartitionSpec)()  # jax declares no types for it
    placed = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(partitioner.mesh, spec or replicated)),
        state.state_dict(),
        partitioner.get_mesh_axes(state).state_dict(),
    )
    return state.restore_state(placed), partitioner


def _axes(*names: str) -> Any:
    from flax.linen.partitioning import AxisMetadata

    return AxisMetadata(names=names)


def save(directory: Path) -> Mapping[str, object]:
    """Save five steps, of which the best two stay, with and without others."""
    checkpoints = _program()
    found: dict[str, object] = {}
    for keeps_others in (False, True):
        state, partitioner = _state(1)
        root = directory / f"keeps_others_{keeps_others}"
        root.mkdir()
        manager = checkpoints.OrbaxCheckpointManagerInterface(
            str(root),
            state,
            partitioner,
            keep=2,
            metric_name_to_monitor="eval/accuracy",
            keep_checkpoints_without_metrics=keeps_others,
        )
        for step in _ACCURACY:
            found[f"saved {step} {keeps_others}"] = manager.save(_state(step)[0])
            manager.wait_until_finished()

        found[f"steps {keeps_others}"] = manager.all_steps()
        manager.close()

    return found


def restore(directory: Path) -> Mapping[str, object]:
    """Restore a step, and one with another name for a parameter, in another dtype."""
    import jax
    import jax.numpy as jnp

    checkpoints = _program()
    state, partitioner = _state(0)
    root = str(directory / "keeps_others_True")
    manager = checkpoints.OrbaxCheckpointManagerInterface(root, state, partitioner, keep=2)
    found = {
        "latest": manager.latest_step(),
        "state": manager.restore(manager.latest_step()).state_dict(),
        "by path": manager.restore(path=f"{root}/checkpoint_3").state_dict(),
    }
    manager.close()
    as_bfloat16 = checkpoints.OrbaxCheckpointManagerInterface(
        root, state, partitioner, restore_dtype=jnp.bfloat16
    )

    def renamed(stored: Any, _item: Any) -> Any:
        params = stored["target"].pop("dense")
        return {**stored, "target": {"dense": jax.tree.map(lambda one: one, params)}}

    found["renamed"] = as_bfloat16.restore(3, state_transformation_fns=[renamed]).state_dict()
    return found
