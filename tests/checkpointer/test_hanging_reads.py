"""Whatever only reads returns in time from a medium that does not answer, and leaves its thread behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import penstock
from penstock.config import Config, StoppingOptions
from penstock.errors import StorageError
from penstock.handlers import LocalStore
from penstock.steps import CheckpointManager
from penstock.testing import FaultyStore, Hang

pytestmark = pytest.mark.anyio
SOON = Config(stopping=StoppingOptions(read_s=0.01))
Call = Callable[[], Awaitable[object]]


def state() -> dict[str, Any]:
    small = {f"b{n}": np.full(9, n) for n in range(9)}
    return {"w": np.arange(500_000, dtype=np.float32), "s": "x", **small}


@pytest.fixture
async def saved(tmp_path: Path) -> str:
    await penstock.save(tmp_path / "one", state())
    return str(tmp_path / "one")


async def is_left(hang: Hang, call: Call) -> None:
    """Check that a call in which an operation hangs ends when it is cancelled, while that still hangs."""
    ended: list[str] = []

    async def run() -> None:
        try:
            await call()
        finally:
            ended.append("cancelled")

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await hang.wait_reached()
            tasks.cancel_scope.cancel()

    assert ended == ["cancelled"]


READS = ["hold_reading", "identity", "list_directory", "read_file", "open_data_file", "file.read_at"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", READS)
async def test_a_restore_whose_medium_hangs_ends_when_it_is_cancelled(saved: str, name: str) -> None:
    store = FaultyStore(LocalStore())
    hang = store.hang_on(name, 1, StorageError(name, "", "gave up"))
    async with penstock.Checkpointer(store=store, config=SOON) as checkpointer:
        await is_left(hang, lambda: checkpointer.restore(saved))
        assert checkpointer.statistics().leased == 0
        np.testing.assert_array_equal((await checkpointer.restore(saved))["w"], state()["w"])
        hang.release()
        with anyio.fail_after(20):
            while store.open_files:  # until the thread that was left behind has closed its own
                await anyio.lowlevel.checkpoint()


async def _all(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


OTHERS: dict[str, tuple[str, Callable[[penstock.Checkpointer, str], Awaitable[object]]]] = {
    "metadata": ("read_file", lambda checkpointer, path: checkpointer.metadata(path)),
    "verify": ("file.read_at", lambda checkpointer, path: checkpointer.verify(path)),
    "items": ("list_directory", lambda checkpointer, path: checkpointer.restore_items(path)),
    "stream": ("file.read_at", lambda checkpointer, path: _all(checkpointer.stream(path))),
}


@pytest.mark.parametrize(("name", "call"), OTHERS.values(), ids=OTHERS)
async def test_every_reading_call_of_a_checkpointer_returns_in_time(saved: str, name: str, call: Any) -> None:
    store = FaultyStore(LocalStore())
    hang = store.hang_on(name, 1, StorageError(name, "", "gave up"))
    async with penstock.Checkpointer(store=store, config=SOON) as checkpointer:
        await is_left(hang, lambda: call(checkpointer, saved))

    assert checkpointer.statistics().leased == 0
    hang.release()


OF_MANAGERS: dict[str, tuple[str, Callable[[CheckpointManager], Awaitable[object]]]] = {
    "reload": ("list_folders", lambda manager: manager.reload()),
    "best": ("read_files", lambda manager: manager.best_step("loss")),
    "metadata": ("read_file", lambda manager: manager.metadata()),
    "root": ("kind", lambda manager: manager.root_metadata()),
    "restore": ("file.read_at", lambda manager: manager.restore()),
    "watch": ("list_folders", lambda manager: anext(manager.watch())),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "call"), OF_MANAGERS.values(), ids=OF_MANAGERS)
async def test_every_reading_call_of_a_manager_returns_in_time(tmp_path: Path, name: str, call: Any) -> None:
    async with CheckpointManager(tmp_path) as manager:
        await (await manager.save(1, state(), metrics={"loss": 1.0}) or _none())

    store = FaultyStore(LocalStore())
    async with CheckpointManager(tmp_path, store=store, config=SOON, read_only=True) as manager:
        at = sum(operation.name == name for operation in store.operations) + 1
        hang = store.hang_on(name, at, StorageError(name, "", "gave up"))
        await is_left(hang, lambda: call(manager))
        hang.release()


def _none() -> Any:
    raise AssertionError("it was not saved")


async def test_a_deadline_is_enough(saved: str) -> None:
    store = FaultyStore(LocalStore())
    hang: Hang = store.hang_on("file.read_at", 1)
    async with penstock.Checkpointer(store=store, config=SOON) as checkpointer:
        with anyio.fail_after(20), anyio.move_on_after(0.1) as scope:
            await checkpointer.restore(saved)

        assert scope.cancelled_caught
        hang.release()


async def test_a_file_that_opens_too_late_is_closed(saved: str) -> None:
    store = FaultyStore(LocalStore())
    async with penstock.Checkpointer(store=store, config=SOON) as checkpointer:
        hang = store.hang_on("open_data_file", 1)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(checkpointer.restore, saved)
                await hang.wait_reached()
                tasks.cancel_scope.cancel()

            hang.release()
            while not any(operation.name == "file.close" for operation in store.operations):
                await anyio.lowlevel.checkpoint()

    assert store.open_files == 0
