"""Sweeps run thousands of saves: in memory where that can be, and without asyncio's debug mode."""

from __future__ import annotations

__all__ = ("folder",)

import gc
from collections.abc import Iterator

import pytest
from tests.memory_folder import folder


@pytest.fixture(scope="module", params=[("asyncio", {"debug": False}), ("trio", {})], ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """As everywhere, but without debug mode, which makes these saves three times as slow."""
    backend: tuple[str, dict[str, object]] = request.param
    return backend


@pytest.fixture(autouse=True, scope="session")
def _nothing_old_is_collected_again() -> None:
    # A full collection takes long with jax loaded. Here all test modules are imported.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _unclosed_streams_and_files_are_found() -> Iterator[None]:
    # They warn when they are collected; collecting here blames the right test.
    yield
    gc.collect()
