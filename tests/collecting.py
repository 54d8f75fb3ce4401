"""What the cyclic collector does between tests."""

from __future__ import annotations

__all__ = ("count_all_as_old", "thawed", "unclosed_streams_and_files_are_found")

import gc
from collections.abc import Iterator

import pytest

from penstock.event_loop.interpreter_settings import AGEING


def count_all_as_old() -> None:
    """Collect, and have no later collection walk what is left.

    With jax and all test modules loaded, a full collection takes longer than most tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unclosed_streams_and_files_are_found() -> Iterator[None]:
    """They warn when they are collected unclosed. Collecting after each test blames the right one."""
    yield
    count_all_as_old()


@pytest.fixture
def thawed() -> Iterator[None]:
    """Let nothing be frozen: where something is, penstock leaves the collector alone."""
    gc.unfreeze()
    AGEING.ask_again()
    yield
    gc.freeze()
