"""A Python without the global interpreter lock is refused when penstock is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.free_threading import refuse_free_threading


def test_with_the_lock_it_is_imported() -> None:
    refuse_free_threading(None)
    refuse_free_threading(lambda: True)


def test_without_the_lock_the_error_says_what_to_do() -> None:
    with pytest.raises(ImportError, match="PYTHON_GIL=1"):
        refuse_free_threading(lambda: False)


def test_an_import_asks() -> None:
    program = "import sys; sys._is_gil_enabled = lambda: False; import penstock"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1] / "src",
    )

    assert run.returncode == 1
    assert "ImportError: penstock does not support" in run.stderr
