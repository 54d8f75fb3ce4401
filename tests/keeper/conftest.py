"""Keepers as they are in use: processes of their own, at sockets with short paths."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.keeper.forked_keeper import Process, fork_a_keeper

from penstock.errors import KeeperLostError
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.keeper.process import arguments

START_S = 60.0


@dataclass
class RunningKeeper:
    """A keeper, which is this process's child."""

    socket: str
    process: Process

    def store(self, answer_s: float = 30.0) -> KeeperStore:
        return KeeperStore(self.socket, answer_s=answer_s)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_until_it_answers(process: Process, socket: str) -> None:
    """Return once a keeper answers."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            KeeperStore(socket, answer_s=START_S).status()
        except KeeperLostError:
            assert process.poll() is None, f"it ended with {process.poll()}"
            assert time.monotonic() < deadline
            os.sched_yield()
        else:
            return


def pages_in_use() -> set[str]:
    """Return the keepers' pages that this process has open or mapped."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    opened = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    found = [*mapped, *[f"{each} {os.readlink(each)}" for each in opened if os.path.lexists(each)]]
    return {each for each in found if "memfd:penstock" in each}


Start = Callable[..., RunningKeeper]


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths have 107 bytes at most."""
    made = Path(tempfile.mkdtemp(prefix="pk-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


Run = Callable[[Sequence[str]], Process]


def run_the_program(given: Sequence[str]) -> Process:
    """Run a keeper with these arguments as users do."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-m", "penstock.keeper", *given], env=environ, text=True)


def start_at(socket: str, limit_bytes: int | None, idle_s: float, run: Run = fork_a_keeper) -> RunningKeeper:
    process = run(arguments(socket, limit_bytes, idle_s, detached=False))
    started = RunningKeeper(socket, process)
    wait_until_it_answers(process, socket)
    return started


@pytest.fixture
def run() -> Run:
    """Runs a keeper; the tests of the program have another one."""
    return fork_a_keeper


@pytest.fixture
def start(short_folder: Path, run: Run) -> Iterator[Start]:
    """Starts keepers, each at a socket in a folder of its own."""
    started: list[RunningKeeper] = []

    def start(
        limit_bytes: int | None = 2**28, idle_s: float = float("inf"), socket: str = ""
    ) -> RunningKeeper:
        where = socket or str(Path(tempfile.mkdtemp(dir=short_folder)) / "keeper")
        started.append(start_at(where, limit_bytes, idle_s, run))
        return started[-1]

    yield start
    for keeper in started:
        keeper.send(signal.SIGCONT)
        keeper.kill()


@pytest.fixture(scope="module")
def keeper(short_folder: Path) -> Iterator[RunningKeeper]:
    """One keeper for the tests of a file, each of which has a path of its own there."""
    started = start_at(str(Path(tempfile.mkdtemp(dir=short_folder)) / "keeper"), 2**29, float("inf"))
    yield started
    started.kill()
