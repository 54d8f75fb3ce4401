"""RecML: a manager derived from Orbax's for the variables of Keras models, and its callback."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.programs.program import Program
from tests.programs.surroundings import bare_package, local_gfile

os.environ["KERAS_BACKEND"] = "jax"

PROGRAM = Program(
    "RecML, `KerasOrbaxCheckpointManager`",
    repository="AI-Hypercomputer/RecML@c1d33cb79cdc044fc70c781bdc9c82119be85c0b",
    wheels=("keras==3.15.1", "namex==0.1.0", "optree==0.17.0"),
    devices=1,
)


def _program() -> Any:
    import keras  # before TensorFlow is stood in for

    keras.utils.set_random_seed(1)
    local_gfile()
    bare_package("recml", "recml.core", "recml.core.utils")
    from recml.core.utils import keras_utils

    return keras_utils


def _model() -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def _variables(model: Any) -> Any:
    import numpy as np

    return {
        "weights": [np.asarray(one) for one in model.variables],
        "optimizer": [np.asarray(one) for one in model.optimizer.variables],
    }


def save(directory: Path) -> Mapping[str, object]:
    """Train for four epochs with the callback, which keeps two."""
    import numpy as np

    program = _program()
    model = _model()
    manager = program.KerasOrbaxCheckpointManager(str(directory / "run"), max_to_keep=2)
    callback = program.EpochOrbaxCheckpointAndRestoreCallback(manager, str(directory / "marker"))
    inputs = np.arange(32, dtype=np.float32).reshape(8, 4)
    model.fit(inputs, inputs.sum(1), epochs=4, verbose=0, callbacks=[callback])
    return {"epochs": manager.all_steps(), "trained": _variables(model)}


def restore(directory: Path) -> Mapping[str, object]:
    """Restore a model in both ways, parts of it, and an epoch that is not there."""
    program = _program()
    found: dict[str, object] = {}
    model = _model()
    manager = program.KerasOrbaxCheckpointManager(str(directory / "run"))
    manager.restore_model_variables(model, manager.latest_step())
    found["by the manager"] = _variables(model)
    for name, options in (
        ("whole", {}),
        ("epoch 2", {"step": 2}),
        ("no optimizer", {"restore_optimizer_vars": False}),
    ):
        model = _model()
        program.restore_keras_model(model, str(directory / "run"), **options)
        found[name] = _variables(model)
    for name, place, step in (("no epoch", "run", 17), ("no checkpoint", "nothing", None)):
        try:
            (directory / place).mkdir(exist_ok=True)
            program.restore_keras_model(_model(), str(directory / place), step=step)
        except (ValueError, FileNotFoundError) as error:
            found[name] = error

    return found
