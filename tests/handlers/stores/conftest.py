"""What the tests of stores share: a disk, and the proof that no descriptor is left open."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.handlers.stores.large_files import takes_direct_io


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a disk that direct transfers are used for."""
    if not takes_direct_io(tmp_path):
        pytest.skip("the temporary folder is on no disk that direct transfers are used for")
    return tmp_path


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Generator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


def open_descriptors() -> set[str]:
    folder = Path("/proc/self/fd")
    return set(os.listdir(folder)) if folder.exists() else set()
