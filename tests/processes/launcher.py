"""Starts the processes of a job, and says what came of each case in each of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.shared_folders import shared_folder
from tests.xla_settings import xla_flags

ROOT = Path(__file__).parents[2]
TAIL = 20_000
"""Characters of each process's log that a failure shows."""

LIMITS = {"JOIN_S": 40, "WRITE_S": 40, "SILENCE_S": 20, "CALL_S": 10}
"""How long processes wait for each other in a case that has no limits of its own: every wait ends in an error
that says what was awaited, before the whole job is ended."""

EXIT_CODES = "exit codes"  # a file of the folder of a job
LAST_WORDS_S = 10.0
"""So much earlier a process says where its tasks wait."""


@dataclass(frozen=True)
class Job:
    """What a job left: the results of its cases, and a log of each process."""

    folder: Path
    count: int
    exit_codes: Sequence[int | None]  #: None for one that had to be killed at the end

    def results(self, case: str) -> list[Any]:
        """Return what a case returned in each process; fail with all logs if it did not in one of them."""
        found = [self._result(case, rank) for rank in range(self.count)]
        failed = [rank for rank, result in enumerate(found) if result is None or "error" in result]
        assert not failed, f"{case} failed in {failed}\n{self.logs(found)}"
        return [result["value"] for result in found]

    def result(self, case: str, rank: int) -> Any:
        """Return what a case returned in one process, the others being dead perhaps."""
        found = self._result(case, rank)
        assert found is not None, f"{case} did not end in {rank}\n{self.logs([])}"
        assert "error" not in found, f"{case} failed in {rank}\n{self.logs([found])}"
        return found["value"]

    def saved(self) -> Path:
        """Return the checkpoint that the case `saves_and_restores` left."""
        self.results("saves_and_restores")
        return self.folder / "saves_and_restores" / "step_1"

    def logs(self, results: Sequence[Any]) -> str:
        """Return what the processes said."""
        said = [result["error"] for result in results if result and "error" in result]
        for rank, code in enumerate(self.exit_codes):
            log = (self.folder / f"log.{rank}").read_text(errors="replace")[-TAIL:]
            said.append(f"---- process {rank}, exit code {code}\n{log}")

        return "\n".join(said)

    def _result(self, case: str, rank: int) -> Any:
        path = self.folder / f"{case}.{rank}.json"
        return json.loads(path.read_text()) if path.exists() else None


def run_once(
    factory: pytest.TempPathFactory,
    count: int,
    cases: Sequence[str],
    *,
    backend: str = "asyncio",
    about: str = "",
) -> Job:
    """Do what `run_job` does, once for all workers of pytest-xdist: whoever comes first runs it.

    There is one such job of each size, and of what it is about.
    """

    def run(folder: Path) -> None:
        job = run_job(folder, count, cases, backend=backend)
        (folder / EXIT_CODES).write_text(json.dumps(job.exit_codes))

    folder = shared_folder(factory, f"job of {count}{about}", run)
    return Job(folder, count, json.loads((folder / EXIT_CODES).read_text()))


def run_job(
    folder: Path, count: int, cases: Sequence[str], *, backend: str = "asyncio", limit_s: float = 150.0
) -> Job:
    """Run cases of `tests.processes.cases` in `count` processes with two devices each, one after another.

    Args:
        folder: Where the cases keep their files; empty.
        count: How many processes.
        cases: By name.
        backend: Of anyio.
        limit_s: For all of it; then each process writes where its threads are, and is killed.
    """
    limits = {f"PENSTOCK_PROCESSES__{name}": str(seconds) for name, seconds in LIMITS.items()}
    told = [str(limit_s - LAST_WORDS_S), backend, *cases]
    started = start_members("tests.processes.member", folder, count, told, limits)
    end = time.monotonic() + limit_s
    codes: list[int | None] = []
    for process in started:
        try:
            codes.append(process.wait(max(0.1, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)

    late = [process for process in started if process.poll() is None]
    for process in late:
        process.send_signal(signal.SIGABRT)

    for process in late:
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)

        process.kill()
        process.wait()

    return Job(folder, count, codes)


def start_members(
    module: str,
    folder: Path,
    count: int,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a job, with two devices each.

    Args:
        module: Run in each, with its rank, their number, a free port, the folder, and the arguments.
        folder: Where each process has its log.
        count: How many processes.
        arguments: The same for all.
        variables: Of the environment, beside those of this process.
    """
    environment = {
        **os.environ,
        **(variables or {}),
        "JAX_PLATFORMS": "cpu",
        "PYTHONFAULTHANDLER": "1",  # a process that is aborted says where its threads were
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": xla_flags(2, "--xla_cpu_multi_thread_eigen=false"),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    started: list[subprocess.Popen[bytes]] = []
    with socket.socket() as held:
        # All of them hold the port, too, so that the system gives it to nobody else before rank 0 listens.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        for rank in range(count):
            told = [str(rank), str(count), str(port), str(folder), *arguments]
            with (folder / f"log.{rank}").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-m", module, *told],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                        env=environment,
                        pass_fds=[held.fileno()],
                    )
                )

    return started
