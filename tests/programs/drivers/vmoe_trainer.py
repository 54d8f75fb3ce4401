"""V-MoE: the manager of its trainer, and states that are restored onto another mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.programs.program import Program, stand_in
from tests.programs.surroundings import bare_package, local_gfile

PROGRAM = Program(
    "V-MoE, `train.trainer`",
    repository="google-research/vmoe@942a78bc81d2e63199f0933733582ddae0715416",
)


def _program() -> Any:
    local_gfile()
    bare_package("vmoe", "vmoe.data", "vmoe.evaluate", "vmoe.nn", "vmoe.train", "vmoe.projects")
    stand_in("clu", "ml_collections", "vmoe.initialization", "vmoe.data.input_pipeline")
    stand_in(
        "vmoe.data.pjit_utils", "vmoe.evaluate.ensemble", "vmoe.evaluate.evaluator", "vmoe.evaluate.fewshot"
    )
    stand_in("vmoe.nn.models", "vmoe.projects.adversarial_attacks", "vmoe.train.optimizer")
    stand_in("vmoe.train.periodic_actions", "vmoe.train.tree_summarizer")
    from vmoe.train import trainer

    return trainer


def _state(step: int) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    trainer = _program()
    params = {
        "moe": {"kernel": jnp.arange(64.0).reshape(8, 8) + step, "router": jnp.ones((4, 8), jnp.bfloat16)},
        "head": {"bias": jnp.full(3, step, jnp.float32)},
    }
    rngs = {"dropout": jax.random.PRNGKey(step)}
    state = trainer.TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1), rngs=rngs)
    return state.replace(step=jnp.int32(step))


def _mesh(n_experts: int) -> Any:
    import jax

    return jax.make_mesh((n_experts, 8 // n_experts), ("expert", "replica"))


def _restored(manager: Any, n_experts: int) -> Any:
    return _program().restore_or_create_train_state(
        ckpt_manager=manager,
        initialize_fn=lambda: _state(1),
        axis_resources_regexes=[(".*/moe/kernel", ("expert",))],
        mesh=_mesh(n_experts),
    )


def save(directory: Path) -> Mapping[str, object]:
    """Save as the loop of the training does: every second step, of which two and each sixth stay."""
    manager = _program().create_checkpoint_manager(
        workdir=str(directory), every_steps=2, keep_last=2, keep_steps_multiple_of=6
    )
    for step in range(14):
        items = {"state": _state(step), "dataset_iterator": {"last_seen_index": step * 32}}
        manager.save(step, items=items, force=step == 0)
    manager.wait_until_finished()
    return {"steps": manager.all_steps(), "params": _state(12).params}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore onto two meshes."""
    manager = _program().create_checkpoint_manager(workdir=str(directory), every_steps=2, keep_last=2)
    found: dict[str, object] = {}
    for n_experts in (4, 8):
        state, index = _restored(manager, n_experts)
        found[f"index {n_experts}"] = index
        found[f"state {n_experts}"] = {"params": state.params, "opt": state.opt_state, "rngs": state.rngs}
    return found
