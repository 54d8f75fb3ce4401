"""Where penstock does not run, an import says so: without the global interpreter lock, and on Windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.unsupported import refuse_free_threading, refuse_windows


def test_with_the_interpreter_lock_penstock_is_imported() -> None:
    refuse_free_threading(None)
    refuse_free_threading(lambda: True)


def test_without_the_interpreter_lock_the_error_says_what_to_do() -> None:
    with pytest.raises(ImportError, match="PYTHON_GIL=1"):
        refuse_free_threading(lambda: False)


def test_windows_is_refused_and_the_linux_in_it_is_not() -> None:
    refuse_windows("linux")
    with pytest.raises(ImportError, match="Windows Subsystem for Linux"):
        refuse_windows("win32")


@pytest.mark.parametrize("system", ["sys._is_gil_enabled = lambda: False", "sys.platform = 'win32'"])
def test_importing_penstock_checks_the_platform(system: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; {system}; import penstock"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1] / "src",
    )

    assert run.returncode == 1
    assert "ImportError: penstock does not support" in run.stderr
