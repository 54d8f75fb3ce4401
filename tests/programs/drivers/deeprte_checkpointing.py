"""DeepRTE: checkpoints of nnx states, next to the names of emergency managers that it imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.programs.program import Program, stand_in
from tests.programs.surroundings import bare_package

PROGRAM = Program(
    "DeepRTE, `train_lib.checkpointing`",
    repository="mazhengcn/deeprte@e3b4ab61e7d3e76656fbb20da49e9297d26785c0",
    path="src",
)


def _program() -> Any:
    stand_in("grain", "grain.python")
    bare_package("deeprte", "deeprte.train_lib")
    stand_in("deeprte.train_lib.multihost_dataloading")
    from deeprte.train_lib import checkpointing

    return checkpointing


def _state(step: int) -> Any:
    import optax
    from flax import nnx

    class TrainState(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(step)
            self.model = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs))
            self.optimizer = nnx.Optimizer(self.model, optax.adam(1e-3), wrt=nnx.Param)

    return nnx.state(TrainState())


def _manager(directory: Path, *, use_async: bool) -> Any:
    return _program().create_orbax_checkpoint_manager(str(directory), True, use_async, 2)


def save(directory: Path) -> Mapping[str, object]:
    """Offer steps to a manager of each kind, and save parameters."""
    program = _program()
    found: dict[str, object] = {}
    for use_async in (False, True):
        manager = _manager(directory / f"async_{use_async}", use_async=use_async)
        for step in range(5):
            found[f"saved {step}, {use_async}"] = program.save_checkpoint(manager, step, _state(step))

        manager.wait_until_finished()
        found[f"steps, {use_async}"] = manager.all_steps()
        manager.close()

    program.save_params_to_path(str(directory / "params"), _state(9)["model"])
    return found


def restore(directory: Path) -> Mapping[str, object]:
    """Restore the latest of each, a whole state by its path, and parameters."""
    from flax import nnx

    program = _program()
    abstract = nnx.eval_shape(lambda: _state(0))
    found: dict[str, object] = {}
    for use_async in (False, True):
        manager = _manager(directory / f"async_{use_async}", use_async=use_async)
        restored, _ = program.load_state_if_possible(manager, None, "", "", _state(0))
        found[f"latest, {use_async}"] = restored["train_state"].to_pure_dict()

    path = str(directory / "async_True" / "2" / "train_state")
    whole, _ = program.load_state_if_possible(None, None, "", path, abstract)
    found["whole"] = whole["train_state"].to_pure_dict()
    _, params = program.load_state_if_possible(None, None, str(directory / "params"), "", abstract)
    found["params"] = params.to_pure_dict()
    return found
