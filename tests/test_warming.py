"""No call imports anything in the event loop, in a process that has called nothing before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("first_calls.py")


def imports_of(*arguments: str) -> dict[str, list[str]]:
    run = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], check=True, capture_output=True, text=True
    )
    found: dict[str, list[str]] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("backend", ["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def test_first_calls_import_nothing_in_the_event_loop(backend: str, tmp_path: Path) -> None:
    found = imports_of(backend, str(tmp_path))

    assert found["on_the_loop"] == []
    assert "jax" in found["after"]  # it was a first call: a worker thread imported all that it needed


def test_after_warm_up_no_call_imports_anything(tmp_path: Path) -> None:
    found = imports_of("asyncio", str(tmp_path), "warm")

    assert found == {"on_the_loop": [], "after": []}
