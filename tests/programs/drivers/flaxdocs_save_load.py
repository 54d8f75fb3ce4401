"""flaxdocs: its example of models of NNX in checkpoints, in three ways."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from flax import nnx
from tests.programs.program import Program

PROGRAM = Program(
    "flaxdocs, `save_load_model`",
    repository="mlnomadpy/flaxdocs@1eda4a34032021b2acff2e907bbf6de6762d169b",
    path="examples",
    devices=1,
    meant={"saved files": "a save that is refused leaves nothing, and Orbax its temporary directory"},
)


def _program() -> Any:
    return import_module("basics.save_load_model")


def _model(seed: int) -> Any:
    return _program().SimpleModel(in_features=4, out_features=2, rngs=nnx.Rngs(seed))


METADATA = {"model_name": "simple", "accuracy": 0.95, "nested": {"batch": 32, "tags": ["a", "b"]}}


def save(directory: Path) -> Mapping[str, object]:
    """Save a model, steps of it, and it with metadata. The parameters alone are none, by their names."""
    program, model = _program(), _model(1)
    program.save_model_nnx(model, str(directory / "whole"))
    refused = None
    try:
        program.save_parameters_only(model, str(directory / "parameters"))
    except ValueError as error:
        refused = error
    program.save_with_metadata(model, str(directory / "metadata"), METADATA)
    for step in (100, 200, 300, 400):
        program.save_with_checkpoint_manager(model, step, str(directory / "steps"))
    return {"refused": refused, "model": nnx.state(model)}


def restore(directory: Path) -> Mapping[str, object]:
    """Load each into another model. Some ways load dicts, which NNX refuses for typed keys."""
    program = _program()
    found: dict[str, object] = {}
    for name, load in {
        "whole": program.load_model_nnx,
        "metadata": program.load_with_metadata,
        "steps": program.load_with_checkpoint_manager,
    }.items():
        model = _model(2)
        try:
            loaded = load(model, str(directory / name))
        except Exception as error:  # each is compared
            found[f"{name} error"] = error
        else:
            found[f"{name} loaded"] = loaded[1:] if isinstance(loaded, tuple) else None
        found[f"{name} state"] = nnx.state(model)
    return found
