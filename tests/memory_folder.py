"""A folder in memory, for tests and proofs that write thousands of checkpoints."""

from __future__ import annotations

__all__ = ("MEMORY", "folder")

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = "/dev/shm"  # a file system whose fsync costs nothing


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that does not exist yet, in memory if possible."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path / "place"
        return

    made = Path(tempfile.mkdtemp(prefix="penstock-", dir=MEMORY))
    yield made / "place"
    shutil.rmtree(made)
