"""Some kills of `make tiers-proof`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(240)
def test_what_killed_trainings_and_keepers_leave_is_found_again() -> None:
    command = [sys.executable, "-m", "tests.proofs.tiers", "--kills=6", "--seed=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "kills: training; no save failed" in done.stdout


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(240)
def test_what_killed_jobs_and_keepers_leave_is_found_again() -> None:
    command = [sys.executable, "-m", "tests.proofs.joint_tiers", "--kills=4", "--seed=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "kills: all" in done.stdout
