"""A few rounds of `make convert-proof`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("trees", "kills"), [(30, 0), (0, 2)])
def test_random_rules_make_what_numpy_makes_also_of_killed_conversions(trees: int, kills: int) -> None:
    parts = [f"--trees={trees}", f"--kills={kills}", "--seed=1"]
    command = [sys.executable, "-m", "tests.proofs.conversions", *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "all as NumPy makes them, and whole" in done.stdout
