"""MaxDiffusion: its managers of many items, and what it loads from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.programs.program import Program
from tests.programs.surroundings import bare_package

PROGRAM = Program(
    "MaxDiffusion, `checkpointing_utils`",
    repository="AI-Hypercomputer/maxdiffusion@7cfb8801d41d1728f0232cd7ee59e900a151fecf",
    path="src",
)


def _program() -> Any:
    bare_package("maxdiffusion", "maxdiffusion.checkpointing")
    from maxdiffusion.checkpointing import checkpointing_utils

    return checkpointing_utils


def _state(factor: float) -> Any:
    import jax
    import numpy as np
    import optax
    from flax.training.train_state import TrainState
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    spec: Any = PartitionSpec("data")
    params = {"block": {"kernel": np.arange(64, dtype=np.float32).reshape(8, 8) * factor}}
    placed = jax.device_put(params, NamedSharding(mesh, spec))
    state: Any = TrainState.create(apply_fn=None, params=placed, tx=optax.sgd(1e-2, momentum=0.9))
    return state.replace(step=np.int32(factor))


CONFIGS = ("unet_config", "vae_config", "text_encoder_config", "scheduler_config", "tokenizer_config")


def save(directory: Path) -> Mapping[str, object]:
    """Save a pipeline of diffusion, and one of video, as its trainers do."""
    import orbax.checkpoint as ocp

    program = _program()
    manager = program.create_orbax_checkpoint_manager(
        str(directory / "images"), True, 2, program.STABLE_DIFFUSION_CHECKPOINT
    )
    for step in (0, 1, 2):
        items: dict[str, Any] = {
            name: ocp.args.JsonSave({"name": name, "sizes": [step, 2]}) for name in CONFIGS
        }
        items["unet_state"] = ocp.args.PyTreeSave(_state(step))
        items["vae_state"] = ocp.args.PyTreeSave({"params": _state(step + 10.0).params})
        manager.save(step, args=ocp.args.Composite(**items))

    manager.wait_until_finished()
    video = program.create_orbax_checkpoint_manager(
        str(directory / "video"), True, 1, program.WAN_CHECKPOINT, use_async=False
    )
    video.save(
        3,
        args=ocp.args.Composite(
            wan_config=ocp.args.JsonSave({"layers": 2}), wan_state=ocp.args.StandardSave(_state(3.0).params)
        ),
    )
    return {"images": manager.all_steps(), "video": video.all_steps()}


def restore(directory: Path) -> Mapping[str, object]:
    """Load configs, a state, parameters alone, and what is not there."""
    import jax

    program = _program()
    manager = program.create_orbax_checkpoint_manager(
        str(directory / "images"), True, 2, program.STABLE_DIFFUSION_CHECKPOINT
    )
    configs, _ = program.load_stable_diffusion_configs({}, manager, program.STABLE_DIFFUSION_CHECKPOINT)
    target = jax.eval_shape(lambda: _state(0.0))
    struct: Any = jax.ShapeDtypeStruct
    placed = jax.tree.map(
        lambda one: struct(one.shape, one.dtype, sharding=getattr(one, "sharding", None)), _state(0.0)
    )
    params = program.load_params_from_path(
        SimpleNamespace(checkpoint_dir=str(directory / "images")), manager, placed.params, "unet_state"
    )
    found = {
        "configs": configs,
        "params": params,
        "state": program.load_state_if_possible(manager, _state(0.0), "unet_state", False),
        "shapes": program.load_state_if_possible(manager, target, "unet_state", False),
        "absent": program.load_state_if_possible(manager, target, "text_encoder_state", False),
    }
    video = program.create_orbax_checkpoint_manager(str(directory / "video"), True, 1, program.WAN_CHECKPOINT)
    metadata = video.item_metadata(3)
    found["described"] = jax.tree.map(lambda one: [list(one.shape), str(one.dtype)], metadata.wan_state.tree)
    _, whole = program.get_cpu_mesh_and_sharding()
    import orbax.checkpoint as ocp

    abstract = jax.tree.map(lambda one: program.add_sharding_to_struct(one, whole), metadata.wan_state.tree)
    found["video state"] = video.restore(
        3,
        args=ocp.args.Composite(
            wan_state=ocp.args.StandardRestore(abstract), wan_config=ocp.args.JsonRestore()
        ),
    )
    return found
