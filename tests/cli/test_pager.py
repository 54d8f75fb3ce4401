"""What is longer than the terminal goes through a pager, as long as there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import penstock

SOURCE = Path(__file__).parents[2] / "src"
PAGED = "> "

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("paged") / "c"
    penstock.sync.save(path, {name: np.ones(len(name)) for name in ("a", "bb", "ccc")})
    return path


def said_on_a_terminal(checkpoint: Path, *more: str, lines: int, pager: str) -> list[str]:
    environment = {**os.environ, "LINES": str(lines), "COLUMNS": "60", "TERM": "xterm", "PAGER": pager}
    command = [sys.executable, "-m", "penstock", "show", str(checkpoint), *more]
    ours, terminal = os.openpty()
    with subprocess.Popen(command, stdout=terminal, cwd=SOURCE, env={**environment, "NO_COLOR": "1"}) as run:
        os.close(terminal)
        said = b""
        with suppress(OSError):  # Linux's way to tell the end
            while part := os.read(ours, 65536):
                said += part

    os.close(ours)
    assert run.returncode == 0
    return said.decode().splitlines()


def test_what_fits_is_not_paged(checkpoint: Path) -> None:
    said = said_on_a_terminal(checkpoint, lines=24, pager=f"sed 's/^/{PAGED}/'")

    assert said[-1] == "3 leaves, 3 of them arrays, 48 B"
    assert not any(line.startswith(PAGED) for line in said)


def test_what_is_longer_than_the_screen_is_paged_from_its_first_line(checkpoint: Path) -> None:
    said = said_on_a_terminal(checkpoint, lines=6, pager=f"sed 's/^/{PAGED}/'")

    assert said[0] == f"{PAGED}{checkpoint}"
    assert said[-1] == f"{PAGED}3 leaves, 3 of them arrays, 48 B"


@pytest.mark.parametrize("pager", ["cat", "", "a-pager-that-is-not-there"])
def test_without_a_pager_everything_is_printed(checkpoint: Path, pager: str) -> None:
    assert said_on_a_terminal(checkpoint, lines=6, pager=pager)[0] == str(checkpoint)


def test_a_pager_that_is_left_early_is_no_failure(checkpoint: Path) -> None:
    assert said_on_a_terminal(checkpoint, lines=3, pager="head -n 1") == [str(checkpoint)]


def test_json_is_paged_like_all_that_is_printed(checkpoint: Path) -> None:
    assert said_on_a_terminal(checkpoint, "--json", lines=6, pager=f"sed 's/^/{PAGED}/'")[0] == f"{PAGED}{{"
