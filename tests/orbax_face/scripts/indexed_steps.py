"""Steps named by a format, each with an index of what it holds, and shardings asked for, as in AXLearn's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_jax: Any = jax
_jnp: Any = jnp


def _mesh() -> Any:
    return _jax.sharding.Mesh(np.asarray(_jax.devices()[:2]).reshape(2), ("data",))


def _sharding(leaf: Any) -> Any:
    axes = ("data",) if leaf.ndim and leaf.shape[0] % 2 == 0 else ()
    return _jax.sharding.NamedSharding(_mesh(), _jax.sharding.PartitionSpec(*axes))


def _state(step: int) -> Any:
    state = {"model": {"w": _jnp.full((4, 2), step * 1.0), "b": _jnp.arange(3.0)}, "prng": _jnp.arange(2)}
    return _jax.tree.map(lambda leaf: _jax.device_put(leaf, _sharding(leaf)), state)


def _manager(ocp: Any, directory: str) -> Any:
    options = ocp.CheckpointManagerOptions(
        create=True,
        max_to_keep=2,
        keep_period=4,
        step_name_format=ocp.path.step.standard_name_format(step_prefix="step", step_format_fixed_length=8),
        should_save_fn=lambda step, latest: step % 2 == 0,
        enable_background_delete=True,
    )
    return ocp.CheckpointManager(directory, options=options, item_names=("index", "state"))


def train(ocp: Any, directory: str) -> Any:
    """Save the even ones of eleven steps; those divisible by four stay, and the last two."""
    manager = _manager(ocp, directory)
    for step in range(11):
        state = _state(step)
        shapes = [[name, str(leaf.dtype), list(leaf.shape)] for name, leaf in state["model"].items()]
        index = [["step", step], *shapes]
        args = ocp.args.Composite(index=ocp.args.JsonSave({"index": index}), state=ocp.args.PyTreeSave(state))
        manager.save(step, args=args)
    manager.wait_until_finished()
    steps = sorted(manager.all_steps())
    manager.close()
    return steps


def resume(ocp: Any, directory: str) -> Any:
    """Read the index first, then the state onto its shardings; an older step, too."""
    manager = _manager(ocp, directory)
    step = manager.latest_step()
    index = manager.restore(step, args=ocp.args.Composite(index=ocp.args.JsonRestore()))["index"]
    wanted = _jax.tree.map(
        lambda leaf: _jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf)), _state(0)
    )
    args = ocp.args.PyTreeRestore(wanted, ocp.checkpoint_utils.construct_restore_args(wanted))
    found = [manager.restore(at, args=ocp.args.Composite(state=args))["state"] for at in (step, 4)]
    manager.close()
    assert all(leaf.sharding == _sharding(leaf) for leaf in _jax.tree.leaves(found))
    return {"step": step, "index": index, "states": found}
