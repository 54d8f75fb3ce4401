"""What `make demo-processes` shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_names_the_dead_process_and_resumes_bit_for_bit() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "docs" / "examples" / "demo")}
    command = [sys.executable, "-m", "processes_demo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "raised PeerSilentError: nothing was heard for 4 s: process 2, last in stage 'write'" in done.stdout
    )
    assert "there is: 0, 2, 4\n" in done.stdout
    assert "losses bit for bit the same, parameters and moments bit for bit the same" in done.stdout
