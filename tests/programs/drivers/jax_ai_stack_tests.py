"""JAX AI stack: its own test of a model of NNX in a checkpoint."""

from __future__ import annotations

from tests.programs.program import Program, Tests

PROGRAM = Program(
    "JAX AI stack, `test_nnx_with_orbax`",
    repository="jax-ml/jax-ai-stack@59de2e1f79348ac85ee26c463c3cede21d8908a5",
    tests=Tests(files=("jax_ai_stack/tests/test_nnx_with_orbax.py",)),
    devices=1,
)
