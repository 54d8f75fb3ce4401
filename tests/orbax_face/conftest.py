"""What the tests of penstock.orbax run under."""

from __future__ import annotations

import pytest
from tests.event_loops import ASYNCIO, Backend


@pytest.fixture(scope="module", params=[ASYNCIO], ids=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Backend:
    """On asyncio alone: Orbax knows no other loop, and nor does code written for it."""
    backend: Backend = request.param
    return backend
