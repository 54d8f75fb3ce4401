"""State and data iterator as items of each step, saved in the background, as MaxText's checkpointing does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_jax: Any = jax
_jnp: Any = jnp


def _manager(ocp: Any, directory: str) -> Any:
    options = ocp.CheckpointManagerOptions(
        create=True, save_interval_steps=2, enable_async_checkpointing=True, max_to_keep=None
    )
    return ocp.CheckpointManager(directory, item_names=("items", "iter"), options=options)


def train(ocp: Any, directory: str) -> Any:
    """Save every second of five steps."""
    state = {"params": {"kernel": _jnp.arange(12.0).reshape(3, 4)}, "step": _jnp.zeros((), _jnp.int32)}
    manager = _manager(ocp, directory)
    saved: list[bool] = []
    for step in range(5):
        state = jax.tree.map(lambda leaf: leaf + 1, state)
        args = ocp.args.Composite(
            items=ocp.args.PyTreeSave(
                item=state,
                save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=2**20), state),
                ocdbt_target_data_file_size=2**20,
            ),
            iter=ocp.args.JsonSave({"position": step}),
        )
        saved.append(manager.save(step, args=args))
    manager.wait_until_finished()
    manager.close()
    return saved


def resume(ocp: Any, directory: str) -> Any:
    """Restore the latest step onto devices, and a part of it."""
    manager = _manager(ocp, directory)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        "params": {"kernel": _jax.ShapeDtypeStruct((3, 4), _jnp.bfloat16, sharding=sharding)},
        "step": _jax.ShapeDtypeStruct((), _jnp.int32, sharding=sharding),
    }
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    step = manager.latest_step()
    args = ocp.args.Composite(
        items=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args), iter=ocp.args.JsonRestore()
    )
    found = manager.restore(step, args=args)
    shape = manager.item_metadata(step)["items"]["params"]["kernel"].shape
    manager.close()
    return {"step": step, "items": found["items"], "iter": found["iter"], "shape": shape}
