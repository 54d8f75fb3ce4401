"""What the tests of penstock.orbax run under."""

from __future__ import annotations

__all__ = ("tmp_path",)

import pytest
from tests.memory_folder import tmp_path


@pytest.fixture(scope="module", params=[("asyncio", {"debug": True})], ids=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """On asyncio alone: Orbax knows no other loop, and nor does code written for it."""
    backend: tuple[str, dict[str, object]] = request.param
    return backend
