"""Qwix: its own tests of parameters that are loaded, renamed and nested by Orbax, and quantised."""

from __future__ import annotations

from tests.programs.program import Program, Tests

PROGRAM = Program(
    "Qwix, `integration_tests`",
    wheels=("qwix==0.1.8",),
    repository="google/qwix@aa623acb24c418563265fd8d541c1d51fc285269",
    tests=Tests(
        files=("integration_tests/orbax_safetensors_test.py", "tests/_src/utils/checkpoint_util_test.py")
    ),
    devices=1,
)
