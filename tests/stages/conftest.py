"""Every test of a stage ends with nothing held: no byte, no thread, no file and no stream."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.stages.stage_rig import Rig


@pytest.fixture(autouse=True, scope="session")
def _nothing_old_is_collected_again() -> None:
    # With jax loaded, a full collection after each test would take longer than the test.
    # Here all test modules are imported.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _unclosed_streams_and_files_are_found() -> Iterator[None]:
    # They warn when they are collected unclosed. Collecting here blames the right test.
    yield
    gc.collect()


@pytest.fixture
async def rig(tmp_path: Path, anyio_backend: object) -> AsyncIterator[Rig]:
    """The environment of a stage. After the test, none of it may be held."""
    made = Rig(tmp_path)
    yield made
    await made.wait_background()
    made.check_idle()
