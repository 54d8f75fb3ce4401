"""An environment that a link leads to is another checkout's: no target clears it, nor installs in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="runs make")


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """What stands for another checkout's environment, to which this one's is a link."""
    folder = tmp_path / "others"
    (folder / "bin").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    (tmp_path / ".venv").symlink_to(folder)
    return folder


def make(folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", target, f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["style", "demo"])
def test_it_is_not_cleared(others: Path, target: str) -> None:
    run = make(others.parent, target)

    assert run.returncode != 0
    assert run.stderr.startswith(f".venv is a link, to {others}, and is not set up from here")
    assert [*others.iterdir()] == [others / "bin"]


def test_nothing_is_installed_in_it(others: Path) -> None:
    python = others / "bin" / "python"
    python.write_text(f"#!/bin/sh\ntouch {others}/ran\n")
    python.chmod(0o755)
    (others / ".installed").touch()

    run = make(others.parent, "docs")

    assert run.returncode != 0
    assert run.stderr.startswith(f".venv is a link, to {others}")
    assert not (others / "ran").exists()
