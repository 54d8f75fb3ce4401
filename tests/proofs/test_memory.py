"""Small versions of `make memory`, each in processes that may not have more than they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("memory.py")
MIB = 2**20

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone"),
]


def run(*options: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *options], capture_output=True, text=True, check=False
    )
    return done, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.process
def test_a_tree_32_times_the_budget_stays_within_it() -> None:
    """128 MiB, the largest leaf 16 MiB, under 4 MiB."""
    done, found = run("--tree=128MiB", "--budget=4MiB", "--slack=48MiB", "--saves=20", "--kinds=numpy")

    assert done.returncode == 0, done.stderr
    assert [entry["what"] for entry in found] == ["save", "restore", "often", "save without a budget"]
    assert all(entry.get("peak_leased_bytes", 0) <= 4 * MIB for entry in found)
    assert found[-1]["exit_status"] != 0


@pytest.mark.slow
def test_leaves_larger_than_the_budget_go_to_devices_and_back_in_parts() -> None:
    """512 MiB, the largest leaf 64 MiB, under 4 MiB."""
    options = ("--tree=512MiB", "--budget=4MiB", "--slack=48MiB", "--saves=0", "--kinds=jax-copied")
    done, found = run(*options)

    assert done.returncode == 0, done.stderr
    without = ["restore without a budget", "save without a budget"]
    assert [entry["what"] for entry in found] == ["save", "restore", *without]
    assert all(entry.get("peak_leased_bytes", 0) <= 4 * MIB for entry in found)
    assert all(entry["exit_status"] != 0 for entry in found[2:])


@pytest.mark.slow
def test_a_memory_limit_that_stops_nothing_fails_the_proof() -> None:
    """What the process may have is so much that it holds all of the tree twice."""
    done, found = run("--tree=32MiB", "--budget=4MiB", "--slack=1GiB", "--saves=0", "--kinds=numpy")

    assert done.returncode != 0
    assert "the limit proves nothing" in done.stderr
    assert found[-1]["exit_status"] == 0
