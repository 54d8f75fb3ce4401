"""Keras 3: the callback `OrbaxCheckpoint`, in a training loop, and back into a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.programs.program import Program

os.environ["KERAS_BACKEND"] = "jax"

PROGRAM = Program(
    "Keras 3, `OrbaxCheckpoint`", wheels=("keras==3.15.1", "namex==0.1.0", "optree==0.17.0"), devices=1
)


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def save(directory: Path) -> Mapping[str, object]:
    """Train for three epochs, each of which is saved, two of them kept."""
    import keras
    import numpy as np

    model = _model()
    callback = keras.callbacks.OrbaxCheckpoint(str(directory / "run"), max_to_keep=2)
    inputs = np.arange(32, dtype=np.float32).reshape(8, 4)
    model.fit(inputs, inputs.sum(1), epochs=3, verbose=0, callbacks=[callback])
    return {
        "weights": [np.asarray(one) for one in model.weights],
        "steps": sorted(map(str, os.listdir(directory / "run"))),
    }


def restore(directory: Path) -> Mapping[str, object]:
    """Load the model as Keras does."""
    import keras
    import numpy as np

    model = keras.saving.load_model(str(directory / "run"))
    return {
        "weights": [np.asarray(one) for one in model.weights],
        "optimizer": [np.asarray(one) for one in model.optimizer.variables],
    }
