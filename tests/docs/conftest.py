"""Pages configure `logging` and structlog, as their readers do."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from penstock.kernel import LOGGER_NAME


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what a page configures: the tests that follow in this process rely on their own."""
    logger = logging.getLogger(LOGGER_NAME)
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    structlog.reset_defaults()
