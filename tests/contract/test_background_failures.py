"""The failure of a background save is told once, whichever way its caller goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

import penstock
from penstock import Checkpointer, SaveFuture, api
from penstock.errors import StorageError
from penstock.handlers import LocalStore
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

ERROR = "no room"


def failing() -> FaultyStore:
    """A store on which the first save fails in its last steps, after it is staged."""
    store = FaultyStore(LocalStore())
    store.fail_on("publish", error=StorageError("publish", "x", ERROR))
    return store


async def failed(checkpointer: Checkpointer, path: Path) -> SaveFuture:
    """A save that has failed, and nobody was told."""
    save = await checkpointer.save(path, {"step": 1})
    over = anyio.Event()
    save.add_done_callback(lambda _: over.set())
    await over.wait()
    return save


async def by_awaiting(_: Checkpointer, save: SaveFuture, __: Path) -> None:
    await save


async def by_a_milestone(_: Checkpointer, save: SaveFuture, __: Path) -> None:
    await save.finalized()


async def by_a_thread(_: Checkpointer, save: SaveFuture, __: Path) -> None:
    await to_thread.run_sync(save.result, 10)


async def by_asking(_: Checkpointer, save: SaveFuture, __: Path) -> None:
    error = save.exception()
    assert error is not None
    raise error


async def by_the_next_save(checkpointer: Checkpointer, _: SaveFuture, path: Path) -> None:
    await checkpointer.save(path, {"step": 2})


async def by_waiting(checkpointer: Checkpointer, _: SaveFuture, __: Path) -> None:
    await checkpointer.wait()


Way = Callable[[Checkpointer, SaveFuture, Path], Awaitable[None]]
WAYS: list[Way] = [by_awaiting, by_a_milestone, by_a_thread, by_asking, by_the_next_save, by_waiting]


@pytest.mark.parametrize("way", WAYS)
async def test_a_failure_is_raised_once_and_not_again_on_leaving(tmp_path: Path, way: Way) -> None:
    async with Checkpointer(store=failing()) as checkpointer:
        save = await failed(checkpointer, tmp_path / "a")
        with pytest.raises(StorageError, match=ERROR):
            await way(checkpointer, save, tmp_path / "b")

        await (await checkpointer.save(tmp_path / "b", {"step": 2}))


async def test_a_failure_that_was_not_seen_is_raised_on_leaving(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=ERROR):
        async with Checkpointer(store=failing()) as checkpointer:
            await checkpointer.save(tmp_path / "a", {"step": 1})


async def test_a_background_failure_is_a_note_on_the_error_of_the_block(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as raised:
        async with Checkpointer(store=failing()) as checkpointer:
            await failed(checkpointer, tmp_path / "a")
            raise KeyError

    assert ERROR in raised.value.__notes__[0]


async def test_a_background_failure_is_logged_if_the_block_is_cancelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with anyio.CancelScope() as scope:
        async with Checkpointer(store=failing()) as checkpointer:
            await failed(checkpointer, tmp_path / "a")
            scope.cancel()
            await anyio.lowlevel.checkpoint()

    assert scope.cancelled_caught
    assert [record.levelname for record in caplog.records if ERROR in record.getMessage()] == ["ERROR"]


async def test_two_background_failures_are_both_raised(tmp_path: Path) -> None:
    store = failing()
    store.fail_on("publish", 2, StorageError("publish", "y", "again"))
    with pytest.raises(StorageError) as raised:
        async with Checkpointer(store=store) as checkpointer:
            hang = store.hang_on("data.write_at")
            await checkpointer.save(tmp_path / "a", {"step": 1})
            await checkpointer.save(tmp_path / "b", {"step": 1})
            hang.release()

    told = " ".join([str(raised.value), *raised.value.__notes__])
    assert ERROR in told
    assert "again" in told


@pytest.mark.parametrize("leaving", [False, True], ids=["result", "leaving"])
def test_a_failure_is_raised_once_without_an_event_loop(tmp_path: Path, leaving: bool) -> None:
    def save() -> None:
        with penstock.sync.Checkpointer(store=failing()) as checkpointer:
            future: Any = checkpointer.save(tmp_path / "a", {"step": 1})
            if not leaving:
                future.result(10)

    with pytest.raises(StorageError, match=ERROR):
        save()


async def test_the_free_functions_raise_a_background_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        await api.save(tmp_path / "file" / "a", {"step": 1})
    with pytest.raises(StorageError):
        await to_thread.run_sync(lambda: penstock.sync.save(tmp_path / "file" / "a", {"step": 1}))
