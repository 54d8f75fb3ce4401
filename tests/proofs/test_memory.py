"""A small version of `make memory`: 128 MiB, the largest leaf 16 MiB, under 4 MiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("memory.py")


@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory from /proc")
def test_a_tree_32_times_the_budget_stays_within_it() -> None:
    options = ["--tree=128MiB", "--budget=4MiB", "--slack=48MiB", "--saves=20", "--kinds=numpy"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *options], capture_output=True, text=True, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]

    assert done.returncode == 0, done.stderr
    assert [entry["what"] for entry in found] == ["save", "restore", "often"]
    assert all(entry.get("peak_leased_bytes", 0) <= 4 * 2**20 for entry in found)
