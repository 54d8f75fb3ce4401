"""Dopamine: its own tests of the checkpointer."""

from __future__ import annotations

from tests.programs.program import Program, Tests

PROGRAM = Program(
    "Dopamine, `checkpointers_test`",
    wheels=("dopamine-rl==4.1.2", "msgpack==1.1.0"),
    repository="google/dopamine@5873f5494ee0c2d7c016d0ab2ad530354fec59d0",
    path="tests",
    tests=Tests(files=("dopamine/jax/checkpointers_test.py",)),
)
