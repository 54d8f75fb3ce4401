"""The option `store.io`, from the configuration to the bytes on disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.config import Config
from penstock.handlers.stores.data_file import takes_direct_io
from penstock.kernel import LOGGER_NAME

pytestmark = pytest.mark.anyio

TREE: dict[str, np.ndarray[Any, Any]] = {
    "large": np.arange(3 * 2**18 + 5, dtype=np.float32),
    "small": np.arange(10),
}


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
async def test_how_files_are_read_is_configured_and_told(
    tmp_path: Path, io: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER_NAME)
    config = Config.load(environ={"PENSTOCK_STORE__IO": io})
    async with penstock.Checkpointer(config=config) as checkpointer:
        await (await checkpointer.save(tmp_path / "1", TREE))
        restored = await checkpointer.restore(tmp_path / "1")

    assert np.array_equal(restored["large"], TREE["large"])
    events: list[dict[str, Any]] = [vars(record).get(LOGGER_NAME, {}) for record in caplog.records]
    (told,) = (event for event in events if event.get("event") == "data.read")
    assert told["direct_bytes"] + told["buffered_bytes"] == sum(leaf.nbytes for leaf in TREE.values())
    descriptor = os.open(tmp_path, os.O_RDONLY)
    if io == "buffered":
        assert told["direct_bytes"] == 0
    elif takes_direct_io(descriptor) and io == "direct":
        assert told["direct_bytes"] >= 2**20
    os.close(descriptor)
