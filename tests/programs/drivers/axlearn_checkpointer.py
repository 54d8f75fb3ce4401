"""AXLearn: its Orbax checkpointer, with Python iterators in the state, and with its tracker file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.programs.program import Program, stand_in
from tests.programs.surroundings import bare_package, local_gfile

PROGRAM = Program(
    "AXLearn, `OrbaxCheckpointer`",
    repository="apple/axlearn@34aed43c1b6e581c4753d06d7cbeedd5010ef26b",
    wheels=("attrs==25.3.0",),
)


def _program() -> Any:
    local_gfile()
    stand_in("tensorflow.python", "tensorflow.python.checkpoint")
    stand_in("tensorflow.python.checkpoint.async_checkpoint_helper")
    bare_package("axlearn", "axlearn.common")
    from axlearn.common import checkpointer_orbax

    return checkpointer_orbax


class _Records:
    """An iterator of AXLearn's protocol."""

    def __init__(self) -> None:
        self.at = 0

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _state(step: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    split: Any = PartitionSpec("data", "model")
    kernel = jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8) * step
    records = _Records()
    records.at = step * 10
    return {
        "model": {"kernel": jax.device_put(kernel, NamedSharding(mesh, split)), "scale": jnp.float32(step)},
        "learner": {"count": jnp.int32(step)},
        "input": records,
    }


def _checkpointer(directory: Path, **options: Any) -> Any:
    program = _program()
    from axlearn.common.checkpointer import every_n_steps_policy
    from axlearn.common.config import config_for_function

    config = program.OrbaxCheckpointer.default_config().set(
        name="checkpointer", dir=str(directory), **options
    )
    config.save_policy = config_for_function(every_n_steps_policy).set(n=2)
    return config.instantiate(parent=None)


TRACKED = {"read_latest_checkpoint_from_tracker_file": True}


def save(directory: Path) -> Mapping[str, object]:
    """Offer ten steps to each of two checkpointers, which save every second."""
    found: dict[str, object] = {}
    for name, options in (("plain", {"keep_period": 4}), ("tracked", TRACKED)):
        (directory / name).mkdir()
        checkpointer = _checkpointer(directory / name, keep_last_n=2, **options)
        for step in range(1, 11):
            checkpointer.save(step=step, state=_state(step))

        checkpointer.wait_until_finished()
        checkpointer.stop()
        paths = checkpointer.checkpoint_paths(str(directory / name))
        found[name] = sorted(Path(path).name for path in paths)
        found[f"{name} tracker"] = [path.read_text() for path in (directory / name).glob("*.txt")]

    return found


def restore(directory: Path) -> Mapping[str, object]:
    """Restore the last step, another, one that is not there, and refuse a state with more in it."""
    found: dict[str, object] = {}
    for name, options in (("plain", {}), ("tracked", TRACKED)):
        checkpointer = _checkpointer(directory / name, keep_last_n=3, **options)
        found[f"{name} known"] = checkpointer._manager.all_steps()
        state = _state(0)
        step, restored = checkpointer.restore(state=state)
        found[f"{name} step"] = step
        found[f"{name} state"] = {**restored, "input": restored["input"].at}
        step, restored = checkpointer.restore(step=8, state=_state(0))
        found[f"{name} 8"] = {**restored, "input": restored["input"].at}
        for kind, number, target in (("absent", 3, state), ("more", 8, {**state, "new": state["learner"]})):
            try:
                checkpointer.restore(step=number, state=target)
            except ValueError as error:
                found[f"{name} {kind}"] = error

        checkpointer.save(step=12, state=_state(12))
        checkpointer.wait_until_finished()
        found[f"{name} known after another"] = checkpointer._manager.all_steps()
        checkpointer.stop()

    return found
