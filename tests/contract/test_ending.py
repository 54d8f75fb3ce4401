"""A process that ends, is told to end, or forks with a save in flight: what is on disk, and what is said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.contract import ending

import penstock

pytestmark = pytest.mark.process
PROGRAM = Path(ending.__file__)
MOST_S = 50
STOPPED = "ended in the middle of the save of"


@contextmanager
def running(which: str, folder: Path) -> Generator[subprocess.Popen[str]]:
    """The program, which is killed if the test leaves it running."""
    assert callable(getattr(ending, which))
    command = [sys.executable, str(PROGRAM), which, str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit status and the rest of what it wrote."""
    out, err = process.communicate(timeout=MOST_S)
    return process.returncode, out, err


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


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
def test_at_exit_a_save_in_flight_is_drained(tmp_path: Path, which: str) -> None:
    with running(which, tmp_path) as process:
        assert ended(process) == (0, "main ends\n", "")

    assert os.listdir(tmp_path) == ["new"]
    assert is_whole(tmp_path / "new")


@pytest.mark.parametrize("which", ["abandoned", "dead_loop"])
def test_at_exit_a_save_is_abandoned_if_so_wanted_or_if_its_loop_is_dead(tmp_path: Path, which: str) -> None:
    with running(which, tmp_path) as process:
        status, out, err = ended(process)

    assert (status, out) == (0, "main ends\n")
    assert err.count(STOPPED) == err.count("\n") == (which == "dead_loop")
    assert not os.path.lexists(tmp_path / "new")
    penstock.sync.save(tmp_path / "new", {"a": ending.TREE["a"], "step": 7})
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize(
    "which",
    ["stopped_asyncio", "stopped_uvloop", pytest.param("stopped_and_left_open", marks=pytest.mark.slow)],
)
def test_a_process_ends_whose_loop_is_stopped_in_the_middle_of_a_save(tmp_path: Path, which: str) -> None:
    with running(which, tmp_path) as process:
        status, out, err = ended(process)

    assert status == 0
    assert sorted(out.splitlines()) == ["main ends", "told: SaveCancelledError"]
    assert err.count(STOPPED) == 1
    assert is_whole(tmp_path / "new")
    penstock.sync.save(tmp_path / "new", {"a": ending.TREE["a"], "step": 7}, overwrite=True)
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize(
    "which", ["main_raises", pytest.param("main_interrupted", marks=pytest.mark.slow), "exits_in_a_callback"]
)
def test_a_process_ends_whose_main_task_does_in_the_middle_of_a_save(tmp_path: Path, which: str) -> None:
    with running(which, tmp_path) as process:
        status, out, err = ended(process)

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
def test_at_exit_what_goes_wrong_is_told_in_one_line(tmp_path: Path, which: str, said: str) -> None:
    with running(which, tmp_path) as process:
        status, _, err = ended(process)

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
def test_a_sigterm_is_held_back_until_the_save_is_over(tmp_path: Path, which: str) -> None:
    with running(which, tmp_path) as process:
        wait_for(process, "saving")
        process.send_signal(signal.SIGTERM)
        status, out, err = ended(process)

    assert (status, err) == (7 if which == "sigterm_own_handler" else -signal.SIGTERM, "")
    assert ("handled" in out) is (which == "sigterm_own_handler")
    assert os.listdir(tmp_path) == ["new"]
    assert is_whole(tmp_path / "new")


@pytest.mark.parametrize("which", ["sigterm_in_vain", "sigterm_not_held"])
def test_a_sigterm_is_not_held_back_for_ever(tmp_path: Path, which: str) -> None:
    with running(which, tmp_path) as process:
        wait_for(process, "saving")
        process.send_signal(signal.SIGTERM)
        status, _, err = ended(process)

    assert (status, err) == (-signal.SIGTERM, "")
    assert not os.path.lexists(tmp_path / "new")


def test_a_second_sigterm_is_not_held_back(tmp_path: Path) -> None:
    with running("sigterm_twice", tmp_path) as process:
        for line in ("saving", "came"):
            wait_for(process, line)
            process.send_signal(signal.SIGTERM)

        assert ended(process)[0] == -signal.SIGTERM

    assert not os.path.lexists(tmp_path / "new")


def test_a_sigterm_without_a_save_is_not_held_back(tmp_path: Path) -> None:
    with running("sigterm_idle", tmp_path) as process:
        wait_for(process, "saving")
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (-signal.SIGTERM, "", "")


@pytest.mark.parametrize(
    "which", ["sigint_asyncio", pytest.param("sigint_trio", marks=pytest.mark.slow), "sigint_sync"]
)
def test_a_keyboard_interrupt_cancels_the_save_and_leaves_nothing(tmp_path: Path, which: str) -> None:
    with running(which, tmp_path) as process:
        wait_for(process, "saving")
        process.send_signal(signal.SIGINT)
        status, _, err = ended(process)

    assert status == -signal.SIGINT
    # Behind it there may be notes, of the save that was cancelled.
    assert re.search("^KeyboardInterrupt$", err, re.MULTILINE), err
    assert os.listdir(tmp_path) == []


def test_a_fork_is_refused_its_parents_checkpointer_and_makes_its_own(tmp_path: Path) -> None:
    with running("forked", tmp_path) as process:
        status, out, err = ended(process)

    assert status == 0, err
    refusals = [line for line in out.split("\n") if line.startswith("refused")]
    assert len(refusals) == 3
    assert f"belongs to process {process.pid}, and this is a fork of it" in refusals[0]
    assert sorted(os.listdir(tmp_path)) == ["new", "parent"]
    assert is_whole(tmp_path / "parent")


def test_a_fork_in_a_coroutine_is_refused_too(tmp_path: Path) -> None:
    with running("forked_async", tmp_path) as process:
        status, _, err = ended(process)

    assert status == 0, err


def test_a_fork_neither_keeps_nor_gives_up_what_its_parent_holds(tmp_path: Path) -> None:
    with running("forked_hold", tmp_path) as process:
        status, out, err = ended(process)

    assert status == 0, err
    assert out == "still held\ngiven up\nmain ends\n"
