"""paxml: its manager over a subclass of Orbax's, with names and metadata of its own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.programs.program import Program, stand_in
from tests.programs.surroundings import bare_package, local_gfile

PROGRAM = Program(
    "paxml, `OrbaxCheckpointManager`",
    repository="google/paxml@b397693fb4dd7b49e90ae549105d024644a03665",
    others=(
        "google/praxis@feeaff19915ca9c3de8b372b7427d15c81f0d757",
        "tensorflow/lingvo@e0be5dc4ce9b89d91c0be343f54c5d7a5b1bcb59",
    ),
    wheels=("typeguard==2.13.3",),
)


def _program() -> tuple[Any, Any]:
    local_gfile()
    bare_package("paxml", "praxis", "lingvo", "lingvo.core")
    stand_in("lingvo.core.cluster", "lingvo.core.cluster_factory", "lingvo.core.hyperparams")
    stand_in(
        "paxml.base_task",
        "praxis.pax_fiddle",
        "praxis.base_input",
        "praxis.base_layer",
        "clu",
        "clu.metrics",
        "tensorflow.compat",
    )
    stand_in("tensorflow.compat.v2")
    clusters: Any = import_module("lingvo.core.cluster_factory")
    clusters.Current = lambda: None

    from paxml import checkpoints, train_states

    return checkpoints, train_states


def _state(step: int) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from praxis import py_utils

    _, train_states = _program()
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    split: Any = PartitionSpec("data", "model")
    whole: Any = PartitionSpec()
    kernel = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    variables = py_utils.NestedMap(dense=py_utils.NestedMap(w=kernel, b=np.full(8, step, np.float32)))
    specs = py_utils.NestedMap(dense=py_utils.NestedMap(w=split, b=whole))
    optimizer = optax.sgd(1e-3, momentum=0.9)
    state = train_states.TrainState(
        step=jnp.asarray(step, jnp.uint32),
        mdl_vars=py_utils.NestedMap(params=variables),
        opt_states=[optimizer.init(variables)],
        extra_state=(),
    )
    places = train_states.TrainState(
        step=whole,
        mdl_vars=py_utils.NestedMap(params=specs),
        opt_states=[(optax.TraceState(specs), optax.EmptyState())],
        extra_state=(),
    )
    placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), state, places)
    return placed, places, mesh


def _manager(directory: Path, **options: Any) -> Any:
    import orbax.checkpoint as ocp

    _program()
    from paxml import checkpoint_managers, checkpoint_types

    # Its own handlers of trees override a method that Orbax 0.12.8 calls with other arguments.
    return checkpoint_managers.OrbaxCheckpointManager(
        directory / "run",
        ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)),
        options=checkpoint_managers.CheckpointManagerOptions(**options),
        checkpoint_type=checkpoint_types.CheckpointType.GDA,
        tensorstore_use_ocdbt=True,
    )


def save(directory: Path) -> Mapping[str, object]:
    """Save some steps, of which the last two and each fourth stay."""
    manager = _manager(directory, max_to_keep=2, save_interval_steps=2, keep_period=4)
    from praxis import trees

    found: dict[str, object] = {}
    for step in range(1, 10):
        if manager.should_save(step):
            state = _state(step)[0]
            found[f"saved {step}"] = manager.save(step, state, trees.get_shape_dtype(state))

    manager.wait_until_finished()
    found["steps"] = manager.all_steps()
    manager.close()
    return found


def restore(directory: Path) -> Mapping[str, object]:
    """Restore the last step onto the mesh, refuse another shape, and save the next step there."""
    import orbax.checkpoint as ocp

    manager = _manager(directory, todelete_subdir="deleted", max_to_keep=2)
    state, places, mesh = _state(0)
    import jax
    from paxml import checkpoint_managers
    from praxis import trees

    restore_args = jax.tree.map(
        lambda one, spec: ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=spec, dtype=one.dtype), state, places
    )
    shapes = trees.get_shape_dtype(state)
    kwargs = {"restore_args": restore_args}
    found: dict[str, object] = {"version": manager.version, "latest": manager.latest_step()}
    found["state"] = manager.restore(manager.latest_step(), state, shapes, restore_kwargs=kwargs)
    try:
        other = shapes.replace(step=jax.eval_shape(lambda one: one[None], shapes.step))
        manager.restore(manager.latest_step(), state, other, restore_kwargs=kwargs)
    except ValueError as error:
        found["other shape"] = error

    manager.save(10, _state(10)[0], shapes)
    manager.wait_until_finished()
    found["steps after another"] = manager.all_steps()
    found["names"] = sorted(path.name for path in (directory / "run").iterdir() if path.name[0] != ".")
    found["any"] = checkpoint_managers._get_checkpoint_version(
        manager._checkpoint_type, manager.directory, 10
    )
    manager.close()
    return found
