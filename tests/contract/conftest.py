"""Sweeps run thousands of saves: in memory where that can be, and without asyncio's debug mode."""

from __future__ import annotations

__all__ = ("folder", "unclosed_streams_and_files_are_found")

import pytest
from tests.collecting import unclosed_streams_and_files_are_found
from tests.memory_folder import folder


@pytest.fixture(scope="module", params=[("asyncio", {"debug": False}), ("trio", {})], ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """As everywhere, but without debug mode, which makes these saves three times as slow."""
    backend: tuple[str, dict[str, object]] = request.param
    return backend
