"""flax: its own tests of `flax.training.checkpoints`, and those of NNX that save."""

from __future__ import annotations

from tests.programs.program import Program, Tests

PROGRAM = Program(
    "flax, its tests of checkpoints",
    wheels=("flax==0.12.8",),
    repository="google/flax@18f8f311c275d57f46d95e41b15aa97b454754c0",
    path="tests",
    tests=Tests(files=("checkpoints_test.py", "nnx/integration_test.py")),
    devices=1,
)
