"""A process that ends, is told to end, or forks with a save in flight: what is on disk, and what is said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.contract import ending

import penstock

pytestmark = pytest.mark.process
PROGRAM = Path(ending.__file__)
STOPPED = "ended in the middle of the save of"


class Program:
    """One of the programs, in a fork of a process that has imported what takes long."""

    def __init__(self, template: subprocess.Popen[str], which: str, folder: Path, aside: Path) -> None:
        assert callable(getattr(ending, which))
        assert template.stdin is not None
        assert template.stdout is not None
        self._told, self._err = template.stdout, aside / "err"
        out = aside / "out"
        os.mkfifo(out)
        self._err.touch()
        template.stdin.write(f"{which} {folder} {out} {self._err}\n")
        template.stdin.flush()
        self.pid = int(self._told.readline())
        self.status: int | None = None
        self.out = out.open()  # once the program has opened it, too

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str, str]:
        """Its exit status and the rest of what it wrote."""
        out = self.out.read()
        self.status = int(self._told.readline())
        return self.status, out, self._err.read_text()

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.status is None:
            with suppress(ProcessLookupError):  # it has ended since, and the template has heard of it
                self.send_signal(signal.SIGKILL)

            self.end()

        self.out.close()


@pytest.fixture(scope="module")
def template() -> Generator[subprocess.Popen[str]]:
    """The process that forks for each program."""
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


Run: TypeAlias = Callable[[str], AbstractContextManager[Program]]


@pytest.fixture
def running(template: subprocess.Popen[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program, and kill it if the test leaves it running."""

    @contextmanager
    def run(which: str) -> Generator[Program]:
        program = Program(template, which, tmp_path, tmp_path_factory.mktemp("streams"))
        try:
            yield program
        finally:
            program.close()

    return run


def wait_for(program: Program, line: str) -> None:
    assert program.out.readline() == f"{line}\n"


def is_whole(path: Path) -> bool:
    tree = penstock.sync.restore(path)
    return bool(tree["a"].tolist() == list(range(1000)) and tree["step"] == 7)


@pytest.mark.parametrize(
    "which",
    [
        "drained",
        pytest.param("drained_asyncio", marks=pytest.mark.slow),
        pytest.param("drained_trio", marks=pytest.mark.slow),
        "idle",
    ],
)
def test_at_exit_a_save_in_flight_is_drained(running: Run, tmp_path: Path, which: str) -> None:
    with running(which) as process:
        assert process.end() == (0, "main ends\n", "")

    assert os.listdir(tmp_path) == ["new"]
    assert is_whole(tmp_path / "new")


@pytest.mark.parametrize("which", ["abandoned", "dead_loop"])
def test_at_exit_a_save_is_abandoned_by_option_or_if_its_loop_is_dead(
    running: Run, tmp_path: Path, which: str
) -> None:
    with running(which) as process:
        status, out, err = process.end()

    assert (status, out) == (0, "main ends\n")
    assert err.count(STOPPED) == err.count("\n") == (which == "dead_loop")
    assert not os.path.lexists(tmp_path / "new")
    penstock.sync.save(tmp_path / "new", {"a": ending.TREE["a"], "step": 7})
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize(
    "which",
    ["stopped_asyncio", "stopped_uvloop", pytest.param("stopped_and_left_open", marks=pytest.mark.slow)],
)
def test_a_process_ends_whose_loop_is_stopped_in_the_middle_of_a_save(
    running: Run, tmp_path: Path, which: str
) -> None:
    with running(which) as process:
        status, out, err = process.end()

    assert status == 0
    assert sorted(out.splitlines()) == ["main ends", "told: SaveCancelledError"]
    assert err.count(STOPPED) == 1
    assert is_whole(tmp_path / "new")
    penstock.sync.save(tmp_path / "new", {"a": ending.TREE["a"], "step": 7}, overwrite=True)
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize(
    "which", ["main_raises", pytest.param("main_interrupted", marks=pytest.mark.slow), "exits_in_a_callback"]
)
def test_a_process_ends_whose_main_task_does_in_the_middle_of_a_save(
    running: Run, tmp_path: Path, which: str
) -> None:
    with running(which) as process:
        status, out, err = process.end()

    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == ["main ends", "told: SaveCancelledError"]
    assert is_whole(tmp_path / "new")
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("drained_in_vain", "did not end within 0.5 s"),
        ("failed_at_exit", "failed during interpreter exit"),
    ],
)
def test_at_exit_what_goes_wrong_is_told_in_one_line(
    running: Run, tmp_path: Path, which: str, said: str
) -> None:
    with running(which) as process:
        status, _, err = process.end()

    assert status == 0
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "which",
    [
        "sigterm_asyncio",
        pytest.param("sigterm_trio", marks=pytest.mark.slow),
        pytest.param("sigterm_sync", marks=pytest.mark.slow),
        "sigterm_own_handler",
    ],
)
def test_a_sigterm_is_held_back_until_the_save_is_over(running: Run, tmp_path: Path, which: str) -> None:
    with running(which) as process:
        wait_for(process, "saving")
        process.send_signal(signal.SIGTERM)
        status, out, err = process.end()

    assert (status, err) == (7 if which == "sigterm_own_handler" else -signal.SIGTERM, "")
    assert ("handled" in out) is (which == "sigterm_own_handler")
    assert os.listdir(tmp_path) == ["new"]
    assert is_whole(tmp_path / "new")


@pytest.mark.parametrize("which", ["sigterm_in_vain", "sigterm_not_held"])
def test_a_sigterm_is_not_held_back_for_ever(running: Run, tmp_path: Path, which: str) -> None:
    with running(which) as process:
        wait_for(process, "saving")
        process.send_signal(signal.SIGTERM)
        status, _, err = process.end()

    assert (status, err) == (-signal.SIGTERM, "")
    assert not os.path.lexists(tmp_path / "new")


def test_a_second_sigterm_is_not_held_back(running: Run, tmp_path: Path) -> None:
    with running("sigterm_twice") as process:
        for line in ("saving", "came"):
            wait_for(process, line)
            process.send_signal(signal.SIGTERM)

        assert process.end()[0] == -signal.SIGTERM

    assert not os.path.lexists(tmp_path / "new")


def test_a_sigterm_without_a_save_is_not_held_back(running: Run, tmp_path: Path) -> None:
    with running("sigterm_idle") as process:
        wait_for(process, "saving")
        process.send_signal(signal.SIGTERM)
        assert process.end() == (-signal.SIGTERM, "", "")


@pytest.mark.parametrize(
    "which", ["sigint_asyncio", pytest.param("sigint_trio", marks=pytest.mark.slow), "sigint_sync"]
)
def test_a_keyboard_interrupt_cancels_the_save_and_leaves_nothing(
    running: Run, tmp_path: Path, which: str
) -> None:
    with running(which) as process:
        wait_for(process, "saving")
        process.send_signal(signal.SIGINT)
        status, _, err = process.end()

    assert status == -signal.SIGINT
    # Behind it there may be notes, of the save that was cancelled.
    assert re.search("^KeyboardInterrupt$", err, re.MULTILINE), err
    assert os.listdir(tmp_path) == []


def test_a_fork_is_refused_its_parents_checkpointer_and_makes_its_own(running: Run, tmp_path: Path) -> None:
    with running("forked") as process:
        status, out, err = process.end()

    assert status == 0, err
    refusals = [line for line in out.split("\n") if line.startswith("refused")]
    assert len(refusals) == 3
    assert f"belongs to process {process.pid}, and this is a fork of it" in refusals[0]
    assert sorted(os.listdir(tmp_path)) == ["new", "parent"]
    assert is_whole(tmp_path / "parent")


def test_a_checkpointer_refuses_work_after_a_fork_in_a_coroutine(running: Run, tmp_path: Path) -> None:
    with running("forked_async") as process:
        status, _, err = process.end()

    assert status == 0, err


def test_a_fork_neither_keeps_nor_gives_up_what_its_parent_holds(running: Run, tmp_path: Path) -> None:
    with running("forked_hold") as process:
        status, out, err = process.end()

    assert status == 0, err
    assert out == "still held\ngiven up\nmain ends\n"
