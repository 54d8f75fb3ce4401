"""Whether the process is the `penstock` command."""

from __future__ import annotations

import pytest

from penstock.own_program import runs_the_command


@pytest.mark.parametrize(
    ("argv", "orig_argv"),
    [
        (["/usr/bin/penstock", "ls"], ["python", "/usr/bin/penstock", "ls"]),
        ([r"C:\env\Scripts\penstock.exe", "ls"], ["python"]),
        (["-m", "ls"], ["python", "-m", "penstock", "ls"]),
        (["-m", "ls"], ["python", "-X", "dev", "-m", "penstock.cli", "ls"]),
        (["-m", "/run/keeper"], ["python", "-P", "-m", "penstock.keeper", "/run/keeper"]),
    ],
)
def test_the_penstock_command_is_known_as_such(argv: list[str], orig_argv: list[str]) -> None:
    assert runs_the_command(argv, orig_argv)


@pytest.mark.parametrize(
    ("argv", "orig_argv"),
    [
        ([], []),
        ([""], ["python"]),
        (["-c"], ["python", "-c", "import penstock"]),
        (["train.py", "penstock"], ["python", "train.py", "penstock"]),
        (["/penstock/train.py"], ["python", "/penstock/train.py"]),
        (["-m", "penstock"], ["python", "-m", "train", "penstock"]),
        (["-m"], ["python"]),
    ],
)
def test_another_program_is_not_taken_for_the_command(argv: list[str], orig_argv: list[str]) -> None:
    assert not runs_the_command(argv, orig_argv)
