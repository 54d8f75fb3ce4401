"""The blocks of docs/howto/many-processes.md, its first line included, run in a job of two processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT, blocks

PAGE = "many-processes.md"
FIRST_PORT, PORTS = 61440, 4096  # where jax puts the service of a job of Open MPI, by the job's number


def job_with_a_free_port() -> int:
    """A number of a job for which jax chooses a port that is free now."""
    for number in range(os.getpid() % PORTS, os.getpid() % PORTS + PORTS):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", FIRST_PORT + number % PORTS)):
                return number

    pytest.skip("no free port")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(120)
def test_the_blocks_run_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    job = job_with_a_free_port()
    processes: list[subprocess.Popen[str]] = []
    for rank in range(2):
        told = {  # what Open MPI tells a process, so that `jax.distributed.initialize()` needs no arguments
            "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        }
        env = {
            **os.environ,
            **told,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "XLA_FLAGS": "",
            "JAX_PLATFORMS": "cpu",
            "PENSTOCK_STORE__KEEPER__SOCKET": str(tmp_path / "keeper"),
        }
        command = [
            sys.executable,
            "-m",
            "tests.docs.page_in_a_job",
            str(tmp_path / "shared"),
            str(tmp_path / f"own{rank}"),
        ]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )

    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()

        keeper = [sys.executable, "-m", "penstock", "keeper"]
        subprocess.run([*keeper, "stop", "--force", "--socket", str(tmp_path / "keeper")], check=False)

    count = len(blocks(f"docs/howto/{PAGE}", "python"))
    for text in said:
        assert f"ran {count} blocks of 2 processes" in text, said
