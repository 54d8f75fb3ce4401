"""Folders that are filled once for all workers of pytest-xdist."""

from __future__ import annotations

__all__ = ("shared_folder",)

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder that the first worker to ask for it has filled. Tests leave it as it is.

    Args:
        factory: pytest's.
        name: Of the folder, one for each thing to fill it with.
        fill: Called with the empty folder. If it fails, the next worker to ask calls it again.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    filled = folder.with_name(f"{name} is filled")
    with folder.with_name(f"{name} is being filled").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            folder.mkdir(exist_ok=True)
            fill(folder)
            filled.touch()

    return folder
