"""What the tests of stores share: a disk, and the proof that no descriptor is left open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from tests.handlers.stores.large_files import takes_direct_io
from tests.open_files import open_paths


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a disk that direct transfers are used for."""
    if not takes_direct_io(tmp_path):
        pytest.skip("the temporary folder is on no disk that direct transfers are used for")
    return tmp_path


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Generator[None]:
    before = open_paths()
    yield
    assert open_paths() - before == Counter()
