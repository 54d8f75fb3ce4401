"""Every test of a stage ends with nothing held: no byte, no thread, no file and no stream."""

from __future__ import annotations

__all__ = ("unclosed_streams_and_files_are_found",)

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.collecting import unclosed_streams_and_files_are_found
from tests.stages.stage_rig import Rig


@pytest.fixture
async def rig(tmp_path: Path, anyio_backend: object) -> AsyncIterator[Rig]:
    """The environment of a stage. After the test, none of it may be held."""
    made = Rig(tmp_path)
    yield made
    await made.wait_background()
    made.check_idle()
