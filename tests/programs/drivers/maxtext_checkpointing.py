"""MaxText: its checkpoints of nnx states, with adapters, of parameters alone, and by the newer API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.programs.program import Program, stand_in
from tests.programs.surroundings import bare_package, local_gfile

PROGRAM = Program(
    "MaxText, `common.checkpointing`",
    repository="AI-Hypercomputer/maxtext@e591f30cbbf217ed67ef71263ec0538239f9c3b8",
    path="src",
)


def _program() -> tuple[Any, Any]:
    local_gfile()
    bare_package("maxtext", "maxtext.common", "maxtext.utils", "maxtext.input_pipeline", "maxtext.trainers")
    bare_package("maxtext.checkpoint_conversion", "maxtext.checkpoint_conversion.utils")
    stand_in("grain", "grain.experimental", "grain.python")
    stand_in("maxtext.checkpoint_conversion.utils.load_dynamic", "maxtext.common.grain_utility")
    stand_in("maxtext.input_pipeline.multihost_dataloading", "maxtext.utils.elastic_utils")
    stand_in("maxtext.input_pipeline.synthetic_data_processing", "maxtext.trainers.diloco")
    stand_in("maxtext.trainers.diloco.utils", "maxtext.trainers.diloco.utils.spmd_diloco_checkpointing")
    from maxtext.common import checkpointing, train_state_nnx

    return checkpointing, train_state_nnx


def _state(step: int, *, adapters: bool = False) -> tuple[Any, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    _, train_state_nnx = _program()

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            if adapters:
                self.lora = nnx.LoRA(8, 2, 8, rngs=rngs)

    model = Model(nnx.Rngs(params=step, dropout=step + 1))
    model.dense.kernel[...] = jnp.arange(64.0).reshape(8, 8) + step
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    optimizer.step[...] = jnp.uint32(step)
    state = nnx.state(train_state_nnx.TrainStateNNX(model, optimizer))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def place(leaf: Any) -> Any:
        spec: Any = PartitionSpec("data", "model") if leaf.shape == (8, 8) else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(place, state), mesh


def _abstract(state: Any) -> Any:
    import jax

    struct: Any = jax.ShapeDtypeStruct
    return jax.tree.map(lambda one: struct(one.shape, one.dtype, sharding=one.sharding), state)


def _manager(directory: Path) -> Any:
    checkpointing, _ = _program()
    return checkpointing.create_orbax_checkpoint_manager(
        str(directory), True, True, 2, max_num_checkpoints_to_keep=2
    )


def _config(*, adapters: bool = False) -> Any:
    dumped = {"lora_rank": 2, "enable_lora": True}
    return SimpleNamespace(
        enable_checkpointing=True,
        enable_continuous_checkpointing=False,
        enable_emergency_checkpoint=False,
        enable_multi_tier_checkpointing=False,
        enable_autocheckpoint=False,
        enable_diloco=False,
        async_checkpointing=True,
        checkpoint_period=2,
        checkpoint_storage_target_data_file_size_bytes=2**20,
        dataset_type="synthetic",
        pure_nnx=True,
        save_checkpoint_on_start=False,
        scan_layers=True,
        lora=SimpleNamespace(enable_lora=adapters, lora_rank=2 * adapters, model_dump=lambda: dumped),
    )


def save(directory: Path) -> Mapping[str, object]:
    """Offer steps of a run and of one with adapters, and save parameters alone."""
    checkpointing, train_state_nnx = _program()
    found: dict[str, object] = {}
    for name, adapters in (("whole", False), ("adapters", True)):
        config, manager = _config(adapters=adapters), _manager(directory / name)
        for step in range(1, 8):
            checkpointing.maybe_save_checkpoint(
                manager, _state(step, adapters=adapters)[0], config, None, step
            )

        checkpointing.wait_until_finished(manager)
        found[f"steps, {name}"] = manager.all_steps()
        manager.close()

    stored = train_state_nnx.to_checkpoint_dict(_state(9)[0])
    checkpointing.save_params_to_path(str(directory / "params"), stored["params"])
    return found


def restore(directory: Path) -> Mapping[str, object]:
    """Resume each run, one without what an earlier version stored, and load parameters."""
    checkpointing, train_state_nnx = _program()
    found: dict[str, object] = {}

    def load(name: str, adapters: bool, into_adapters: bool, **options: Any) -> Any:
        target = _abstract(_state(0, adapters=into_adapters)[0])
        manager = _manager(directory / name)
        restored, _ = checkpointing.load_state_if_possible(
            manager, None, "", "", 96, target, maxtext_config=_config(adapters=adapters), **options
        )
        manager.close()
        return restored["items"].to_pure_dict()

    found["whole"] = load("whole", adapters=False, into_adapters=False)
    found["whole 4"] = load("whole", adapters=False, into_adapters=False, step=4)
    found["adapters"] = load("adapters", adapters=True, into_adapters=True)
    try:
        found["adapters from none"] = load("whole", adapters=True, into_adapters=True)
    except ValueError as error:
        found["adapters from none"] = error
    try:
        load("whole", adapters=False, into_adapters=True)
    except ValueError as error:
        found["a weight is not stored"] = str(error).splitlines()

    target = _abstract(_state(0)[0])
    path = str(directory / "whole" / "6" / "items")
    for newer in (False, True):
        restored, _ = checkpointing.load_state_if_possible(
            None, None, "", path, 96, target, enable_orbax_v1=newer
        )
        found[f"full, newer {newer}"] = restored["items"].to_pure_dict()

    params = checkpointing._abstract_params(_abstract(_state(0)[0]))
    for name, place in (("params", directory / "params"), ("params of a run", Path(path))):
        found[name] = checkpointing.load_params_from_path(str(place), params, 96).to_pure_dict()

    linen = _abstract(train_state_nnx.to_checkpoint_dict(_state(0)[0]))
    for newer in (False, True):
        try:
            found[f"linen {newer}"] = checkpointing._load_full_state_from_path(
                path, linen, newer, None, "orbax", 96, True, True
            )
        except Exception as error:
            found[f"linen {newer}"] = error

    found["metadata"] = checkpointing.load_checkpoint_metadata(path)
    return found
