"""A kill in each scene of `make crash`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.proofs.crash_roles import SCENES, Line, is_stale

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(240)
def test_what_killed_processes_leave_is_whole() -> None:
    command = [sys.executable, "-m", "tests.proofs.crash_loop", f"--kills={len(SCENES)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert all(f"1 kills: {name}" in done.stdout for name in SCENES)


@pytest.mark.parametrize(
    ("said", "number", "stale"),
    [
        ("begun 1, durable 1, begun 2, durable 2", 1, True),
        ("begun 1, durable 1, begun 2", 1, False),
        ("begun 1, begun 2, durable 1, durable 2", 1, False),
        ("begun 1, begun 2, durable 2, durable 1", 1, False),
        ("begun 1, begun 2, durable 2", 1, False),
        ("begun 1, durable 1", None, True),
        ("begun 1", None, False),
    ],
)
def test_a_state_is_stale_if_one_that_began_later_was_durable(
    said: str, number: int | None, stale: bool
) -> None:
    lines = [Line("saver", what, int(of)) for what, of in map(str.split, said.split(", "))]

    assert is_stale(number, lines) is stale
