"""A third party's background work that never ends: the save that it belongs to ends all the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.stages.rig import Parcel, ParcelHandler, with_parcels

from penstock.checkpointer import Checkpointer
from penstock.handlers.leaves.registry import default_handlers
from penstock.handlers.stores.local import LocalStore
from penstock.kernel.config import Config
from penstock.kernel.errors import HandlerFailedError, SaveCancelledError, StorageError
from penstock.kernel.stopping import StoppingOptions
from penstock.testing import FaultyStore, Hang

pytestmark = pytest.mark.anyio

TREE = {"p": Parcel("text"), "step": 3}


class Hanging:
    """A Checkpointer whose third-party handler hangs while it writes the leaf `p`."""

    def __init__(self, undo_s: float = 0.05) -> None:
        self.handler = ParcelHandler()
        self.hang: Hang = self.handler.hang("write", "p")
        self.store = FaultyStore(LocalStore())
        registry = with_parcels(default_handlers(entry_points=False), self.handler)
        config = Config(stopping=StoppingOptions(undo_s=undo_s))
        self.checkpointer = Checkpointer(store=self.store, registry=registry, config=config)


async def test_cancelling_it_ends_and_names_the_handler_and_the_key_path(tmp_path: Path) -> None:
    hanging = Hanging()
    with pytest.raises(
        HandlerFailedError, match=r"\['p'\].*ParcelHandler.*did not end within 0.05 s"
    ) as raised:
        async with hanging.checkpointer as checkpointer:
            saves.append(await checkpointer.save(tmp_path / "new", TREE))
            await hanging.hang.wait_reached()
            saves[0].cancel()

    assert raised.value.key_path == "['p']"
    assert raised.value.handler.endswith("ParcelHandler")
    assert saves[0].exception() is raised.value
    assert hanging.checkpointer.statistics().leased == 0
    assert not os.path.lexists(tmp_path / "new")
    hanging.hang.release()


async def test_nobody_builds_where_it_may_still_write_until_it_has_ended(tmp_path: Path) -> None:
    hanging = Hanging()
    async with hanging.checkpointer as checkpointer:
        save = await checkpointer.save(tmp_path / "new", TREE)
        await hanging.hang.wait_reached()
        save.cancel()
        with pytest.raises(HandlerFailedError):
            await save

        (left,) = os.listdir(tmp_path)
        with pytest.raises(StorageError, match="somebody builds"):
            await (await checkpointer.save(tmp_path / "new", {"step": 4}))
        await (await checkpointer.save(tmp_path / "other", {"step": 4}))  # but elsewhere

        assert sorted(os.listdir(tmp_path)) == sorted([left, "other"])

    assert checkpointer._threads is not None
    hanging.hang.release()
    del hanging, checkpointer, save
    await _next_save(tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["new", "other"]


async def _next_save(path: Path) -> None:
    """Save as soon as nobody builds there: the thread that waited for the handler lets go by itself."""
    async with Checkpointer() as checkpointer:
        while True:
            try:
                await (await checkpointer.save(path, {"step": 5}))
            except StorageError:
                await anyio.lowlevel.checkpoint()
            else:
                return


async def test_leaving_the_context_by_cancellation_ends(tmp_path: Path) -> None:
    hanging = Hanging()
    with anyio.CancelScope() as scope:
        async with hanging.checkpointer as checkpointer:
            await checkpointer.save(tmp_path / "new", TREE)
            await hanging.hang.wait_reached()
            scope.cancel()

    assert scope.cancelled_caught
    hanging.hang.release()


async def test_a_failure_elsewhere_is_raised_with_the_hang_in_a_note(tmp_path: Path) -> None:
    hanging = Hanging()
    error = StorageError("write", "x", "no room")
    hanging.store.fail_on("data.write_at", error=error)
    with pytest.raises(StorageError) as raised:
        async with hanging.checkpointer as checkpointer:
            await (await checkpointer.save(tmp_path / "new", TREE))

    assert raised.value is error
    notes: list[Any] = error.__notes__
    assert any("ParcelHandler" in note and "['p']" in note for note in notes)
    hanging.hang.release()


async def test_what_ends_in_time_is_waited_for_and_removed(tmp_path: Path) -> None:
    hanging = Hanging(undo_s=30.0)
    async with hanging.checkpointer as checkpointer:
        save = await checkpointer.save(tmp_path / "new", TREE)
        await hanging.hang.wait_reached()
        save.cancel()
        await anyio.lowlevel.checkpoint()
        hanging.hang.release()
        with pytest.raises(SaveCancelledError):
            await save

        assert os.listdir(tmp_path) == []
        await (await checkpointer.save(tmp_path / "new", {"step": 4}))
