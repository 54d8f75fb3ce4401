"""Keras: its own tests of the callback `OrbaxCheckpoint`."""

from __future__ import annotations

import os

from tests.programs.program import Program, Tests

os.environ["KERAS_BACKEND"] = "jax"

PROGRAM = Program(
    "Keras 3, `orbax_checkpoint_test`",
    repository="keras-team/keras@3422977a5e38fb2f7709aaa9a08e47f0c43d0f60",
    wheels=("namex==0.1.0", "optree==0.17.0"),
    tests=Tests(files=("keras/src/callbacks/orbax_checkpoint_test.py",)),
)
