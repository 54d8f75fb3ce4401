"""What `penstock ls` is told about pinned steps."""

from __future__ import annotations

import errno
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from tests.own_files import listed

import penstock
from penstock.errors import StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores.publishing import WRITER, read_pins
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio


async def told(root: Path, *steps: int) -> None:
    """Return once these steps are told; a thread writes them."""
    while sorted(read_pins(LocalStore(), str(root))) != list(steps):
        await anyio.lowlevel.checkpoint()


async def test_pins_are_told_while_the_manager_is_open(tmp_path: Path) -> None:
    async with penstock.CheckpointManager(tmp_path) as manager:
        await manager.save(1, {"w": np.ones(2)})
        await manager.wait()
        assert list(read_pins(LocalStore(), str(tmp_path))) == []
        manager.pin(1)
        manager.pin(7)
        await told(tmp_path, 1, 7)
        manager.unpin(7)
        await told(tmp_path, 1)

    assert list(read_pins(LocalStore(), str(tmp_path))) == []
    assert listed(tmp_path) == ["1"]


async def test_pins_of_a_crashed_manager_count_no_more(tmp_path: Path) -> None:
    (tmp_path / WRITER).mkdir()
    (tmp_path / WRITER / "pins.json").write_text("[1]")
    assert list(read_pins(LocalStore(), str(tmp_path))) == []

    async with penstock.CheckpointManager(tmp_path) as manager:
        await told(tmp_path)
        manager.pin(2)
        await told(tmp_path, 2)


@pytest.mark.parametrize("text", ["", "[", "{}", '["a"]', "\udcff"])
async def test_what_is_no_list_of_steps_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / WRITER).mkdir()
    (tmp_path / WRITER / "pins.json").write_bytes(text.encode(errors="surrogateescape"))
    held = LocalStore().hold(str(tmp_path / WRITER))
    try:
        assert list(read_pins(LocalStore(), str(tmp_path))) == []
    finally:
        held.release()


async def test_a_medium_that_refuses_disturbs_no_save(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    async with penstock.CheckpointManager(tmp_path, store=store) as manager:
        await told(tmp_path)
        hang = store.hang_on("replace_file", then=StorageError("write", "pins", "is full", errno.ENOSPC))
        manager.pin(1)
        await hang.wait_reached()
        await manager.save(1, {"w": np.ones(2)})
        await manager.wait()
        hang.release()

    assert listed(tmp_path) == ["1"]
