"""Where the check of a release works, and which interpreters there are. Standard library only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ("ROOT", "WORK", "interpreter", "project", "quietly", "ten_lines", "venv")

import tomllib
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "release"


def project() -> dict[str, Any]:
    """The table `[project]` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def interpreter(version: str) -> str | None:
    """A Python of this version that runs: one on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    for found in [*([on_path] if on_path else []), *map(str, sorted(pyenv.glob(f"{version}*/bin/python3")))]:
        asked = "import sys; print('%d.%d' % sys.version_info[:2])"
        run = subprocess.run([found, "-c", asked], capture_output=True, text=True, check=False)
        if run.returncode == 0 and run.stdout.strip() == version:
            return found

    return None


def quietly(
    *command: str | Path, cwd: Path = WORK, env: dict[str, str] | None = None, fails: bool = False
) -> str:
    """Run a command, and return what it printed.

    Args:
        command: Its words.
        cwd: Where it runs.
        env: What is otherwise in its environment.
        fails: Whether its exit status does not matter.

    Raises:
        SystemExit: If it fails; with the last that it said.
    """
    run = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if run.returncode and not fails:
        shown = " ".join(map(str, command))
        raise SystemExit(f"{run.stdout[-5000:]}\nfailed with {run.returncode}: {shown}")

    return run.stdout


def venv(name: str, python: str, *packages: str | Path, again: bool = False) -> Path:
    """Make an environment below the work folder, and return its interpreter.

    Args:
        name: Of the folder.
        python: The interpreter that makes it.
        packages: What `pip install` is given.
        again: Make it anew even if it is there.
    """
    folder = WORK / name
    inside = folder / "bin" / "python"
    if inside.exists() and not again:
        return inside

    made = subprocess.run([python, "-m", "venv", "--clear", folder], capture_output=True, check=False)
    if made.returncode:  # Debian without python3-venv has no ensurepip
        quietly(python, "-m", "venv", "--clear", "--without-pip", folder)
        quietly(python, "-m", "pip", "--python", folder, "install", "--quiet", "pip")
    quietly(inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return inside


def tools() -> Path:
    """An environment with what checks a release; the library is not in it."""
    needed = ("build", "twine", "mypy", "pyright[nodejs]", "cyclonedx-bom", "setuptools>=77", "wheel")
    return venv("tools", sys.executable, *needed)


def ten_lines() -> str:
    """The first program of the README."""
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]
