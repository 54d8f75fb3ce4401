"""What the tests of stores share: a disk, and the proof that no descriptor is left open."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress
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
def no_descriptor_is_left(tmp_path: Path) -> Generator[None]:
    yield
    assert open_files(tmp_path) == []


def open_files(folder: Path) -> list[str]:
    """What this process has open in a folder, removed files too; other threads may open what they like."""
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        return []

    found: list[str] = []
    for descriptor in os.listdir(descriptors):
        with suppress(OSError):  # that of the listing itself
            found.append(os.readlink(descriptors / descriptor))

    return [target for target in found if target.startswith(str(folder))]
