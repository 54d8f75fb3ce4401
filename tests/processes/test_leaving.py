"""How long a process takes to end after the save that another one's death ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.processes.launcher import start_members

COUNT = 3
SHUTDOWN_S = 5
"""What the processes give jax for its shutdown, instead of 300 s."""

MOST_S = 100.0
"""For all of it: to start, to save, and to fall silent on a loaded machine. Far below what jax would wait."""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(150)
def test_an_ordinary_exit_waits_no_longer_than_jax_was_told(tmp_path: Path) -> None:
    started = start_members("tests.processes.leaving_member", tmp_path, COUNT, [str(SHUTDOWN_S)])
    try:
        for process in started:
            process.wait(MOST_S)
    except subprocess.TimeoutExpired:
        logs = [(tmp_path / f"log.{rank}").read_text(errors="replace")[-2000:] for rank in range(COUNT)]
        pytest.fail("\n".join(["a process hangs", *logs]))
    finally:
        for process in started:
            process.kill()
            process.wait()

    for rank in range(COUNT - 1):
        assert (tmp_path / f"told.{rank}").read_text().startswith(f"['PeerSilentError', [{COUNT - 1}]")
