"""Folders in memory, for tests and proofs that write thousands of checkpoints."""

from __future__ import annotations

__all__ = ("MEMORY", "folder", "in_memory")

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = "/dev/shm"  # a file system whose fsync costs nothing
ENOUGH = 1 << 30  # bytes; a container has 64 MiB there, unless it was asked for more
ON_DISK = "PENSTOCK_TESTS_ON_DISK"  # the environment variable with which all tests write to a disk


def in_memory() -> bool:
    """Return whether tests may write there."""
    return os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ENOUGH


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that does not exist yet, in memory if possible."""
    if not in_memory():
        yield tmp_path_factory.mktemp("folder") / "place"
        return

    made = Path(tempfile.mkdtemp(prefix="penstock-", dir=MEMORY))
    yield made / "place"
    shutil.rmtree(made)
