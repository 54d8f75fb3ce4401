"""Keras 3: the callback `OrbaxCheckpoint`, in a training loop, and back into a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.programs.program import Program

os.environ["KERAS_BACKEND"] = "jax"

PROGRAM = Program(
    "Keras 3, `OrbaxCheckpoint`",
    wheels=("keras==3.15.1", "namex==0.1.0", "optree==0.17.0"),
    devices=1,
)


def _facts(model: Any) -> Mapping[str, object]:
    variables = {"weights": model.weights, "optimizer": model.optimizer.variables}
    return {name: [one.value for one in each] for name, each in variables.items()}


def save(directory: Path) -> Mapping[str, object]:
    """Train for three epochs, each of which is saved, two of them kept."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    entry = keras.Input((4,))  # Keras finds the variables of a Sequential by other names than it saved
    model = keras.Model(entry, keras.layers.Dense(1)(keras.layers.Dense(3)(entry)))
    model.compile("adam", "mse")
    callback = keras.callbacks.OrbaxCheckpoint(str(directory / "run"), max_to_keep=2)
    inputs = np.arange(32, dtype=np.float32).reshape(8, 4)
    model.fit(inputs, inputs.sum(1), epochs=3, verbose=0, callbacks=[callback])
    return {**_facts(model), "steps": sorted(os.listdir(directory / "run"))}


def restore(directory: Path) -> Mapping[str, object]:
    """Load the whole model, and the weights into another one, as Keras does."""
    import keras

    model = keras.saving.load_model(str(directory / "run"))
    other = keras.models.clone_model(model)
    other.load_weights(str(directory / "run"))
    return {**_facts(model), "weights alone": [one.value for one in other.weights]}
