"""What the tests of stores share: a disk, and the proof that no descriptor is left open."""

from __future__ import annotations

import os
from collections import Counter
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
def no_descriptor_is_left() -> Generator[None]:
    before = open_paths()
    yield
    assert open_paths() - before == Counter()


def open_paths() -> Counter[str]:
    """The files and folders that are open, wherever they are, and how often; no pipes, no sockets.

    What the system says of itself does not count: a checkpointer that an earlier test left to the
    collector may be reading how much memory is free.
    """
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        return Counter()

    found: Counter[str] = Counter()
    for descriptor in os.listdir(descriptors):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself is closed by now
            found[os.readlink(descriptors / descriptor)] += 1

    return Counter({target: n for target, n in found.items() if _is_stored(target)})


def _is_stored(target: str) -> bool:
    return target.startswith("/") and not target.startswith(("/proc/", "/sys/", "/dev/"))
