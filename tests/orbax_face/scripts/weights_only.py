"""Only the weights of a training state, narrower than saved, as programs that serve or fine-tune load them.

Levanter and MaxText keep the optimizer beside the weights, and their exporters leave it where it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

_jax: Any = jax
_jnp: Any = jnp


def _state() -> Any:
    params = {f"layer_{n}": {"kernel": _jnp.full((3, 2), n + 0.5), "bias": _jnp.zeros(2)} for n in range(2)}
    return {"step": 12, "params": params, "opt_state": optax.adamw(1e-3).init(params)}


def train(ocp: Any, directory: str) -> Any:
    """Save everything, in the background, with a size for data files."""
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        args = ocp.args.PyTreeSave(_state(), ocdbt_target_data_file_size=1 << 20)
        checkpointer.save(Path(directory) / "12", args=args)
        checkpointer.wait_until_finished()
    return sorted(path.name for path in Path(directory).iterdir())


def resume(ocp: Any, directory: str) -> Any:
    """Restore the weights in bfloat16, once by leaving the rest out, and once by placeholders for it."""
    place = _jax.sharding.SingleDeviceSharding(_jax.devices()[0])
    params = _jax.tree.map(
        lambda leaf: _jax.ShapeDtypeStruct(leaf.shape, _jnp.bfloat16, sharding=place), _state()["params"]
    )
    wanted = {"params": params}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        part = checkpointer.restore(
            Path(directory) / "12",
            args=ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True),
        )
        rest = _jax.tree.map(lambda _: ocp.PLACEHOLDER, {"opt_state": _state()["opt_state"], "step": 0})
        whole = {**rest, **wanted}
        restore_args = ocp.checkpoint_utils.construct_restore_args(whole)
        held = checkpointer.restore(
            Path(directory) / "12", args=ocp.args.PyTreeRestore(whole, restore_args=restore_args)
        )
    return {"part": part["params"], "held": held["params"], "left": held["step"] is ocp.PLACEHOLDER}
