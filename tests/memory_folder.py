"""A folder in memory, for tests and proofs that write thousands of checkpoints."""

from __future__ import annotations

__all__ = ("MEMORY", "folder", "tmp_path")

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = "/dev/shm"  # a file system whose fsync costs nothing
ON_DISK = "PENSTOCK_TESTS_ON_DISK"  # the environment variable with which all tests write to a disk


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that does not exist yet, in memory if possible."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path_factory.mktemp("folder") / "place"
        return

    made = Path(tempfile.mkdtemp(prefix="penstock-", dir=MEMORY))
    yield made / "place"
    shutil.rmtree(made)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In place of pytest's own, in memory if possible: for rooms whose tests are not about a disk.

    Half the time of a test that saves is spent waiting for one. `make test-all` uses it all the same.
    """
    if os.environ.get(ON_DISK) or not os.access(MEMORY, os.W_OK):
        yield tmp_path_factory.mktemp("folder")
        return

    made = Path(tempfile.mkdtemp(prefix="penstock-", dir=MEMORY))
    yield made
    shutil.rmtree(made, ignore_errors=True)
