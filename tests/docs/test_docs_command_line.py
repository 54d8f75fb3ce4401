"""The commands that docs/reference/command-line.md shows print what it shows, but for sizes and ages."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.docs.blocks import blocks

import penstock
from penstock.cli import main

PAGE = "command-line.md"
NUMBER = re.compile(r"\d[\d.]*(?: ?(?:[kM]?B|s|min|h|d)\b)?")


def shown() -> list[tuple[str, list[str]]]:
    """Each command that the page shows, and the lines below it."""
    found: list[tuple[str, list[str]]] = []
    for line in (
        line for block in blocks(f"docs/reference/{PAGE}", "console") for line in block.text.splitlines()
    ):
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)

    return found


def printed(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a command of the page prints: a table, or behind it `cut` with some of the columns."""
    first, _, behind = command.partition(" | ")
    name, *words = shlex.split(first)
    assert name == "penstock"
    assert main(words if behind else ["--table", *words]) == (1 if words[0] == "diff" else 0)
    lines = capsys.readouterr().out.replace(os.getcwd(), "/data").splitlines()
    if not behind:
        return lines

    cut = re.fullmatch(r"cut -f([\d,]+)", behind)
    assert cut is not None
    columns = [int(each) - 1 for each in cut[1].split(",")]
    return ["\t".join(line.split("\t")[at] for at in columns) for line in lines]


def without_sizes(lines: list[str]) -> list[list[str]]:
    """The words of each line, with `#` for a number and its unit. Rules and empty lines are left out."""
    words = [NUMBER.sub("#", line).split() for line in lines]
    return [each for each in words if each and not set("".join(each)) <= {"-"}]


def block(number: int, step: int) -> dict[str, dict[str, npt.NDArray[np.float32]]]:
    """A block of a model, of which the first moves."""
    moves = 0.01 * step / 100 if number == 0 else 0
    attention = {name: np.full((64, 64), 1 + moves, np.float32) for name in "kqv"}
    return {
        "attn": attention,
        "mlp": {"wi": np.ones((64, 256), np.float32), "wo": np.ones((256, 64), np.float32)},
    }


def test_the_commands_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    with penstock.sync.CheckpointManager("run") as manager:
        for step, loss in ((100, 1.0), (200, 1 / 3)):
            blocks = [block(n, step) for n in range(4)]
            params = {"blocks": blocks, "head": np.ones((64, 1000), np.float32)}
            manager.save(step, {"params": params, "step": step}, metrics={"loss": loss})

    commands = shown()
    assert len(commands) == 5
    for command, lines in commands:
        assert without_sizes(printed(command, capsys)) == without_sizes(lines)
