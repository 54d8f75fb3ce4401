"""What happens while a manager decides which steps go, and while it deletes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.own_files import listed

from penstock import SaveFuture
from penstock.errors import StorageError
from penstock.handlers import LocalStore
from penstock.steps import CheckpointManager, FirstSave, KeepLast, SaveMoment, StepInfo
from penstock.steps.step_directory import StepReader
from penstock.testing import FaultyStore, Hang, Operation

pytestmark = pytest.mark.anyio


def there(root: Path) -> list[str]:
    return listed(root)


class Slow:
    """Keeps the last step; the decision about step `at` takes until it is released."""

    needs: frozenset[Any] = frozenset()

    def __init__(self, at: int) -> None:
        self.at = at
        self.hang = Hang()

    def keep(self, steps: Sequence[StepInfo], now_s: float, /) -> list[int]:
        if steps[-1].step == self.at:
            self.hang.hold(Operation("keep", ""))

        return [steps[-1].step]


async def save(manager: CheckpointManager, step: int) -> SaveFuture:
    saving = await manager.save(step, {"n": step})
    assert saving is not None
    await saving
    return saving


@pytest.mark.parametrize("meanwhile", ["pin", "unpin"])
async def test_what_is_pinned_when_it_is_decided_stays(tmp_path: Path, meanwhile: str) -> None:
    policy = Slow(3)
    async with CheckpointManager(tmp_path, keep=policy) as manager:
        manager.pin(1)
        await save(manager, 1)
        await save(manager, 2)
        await manager.wait()
        if meanwhile == "pin":
            manager.unpin(1)

        await save(manager, 3)
        await policy.hang.wait_reached()
        getattr(manager, meanwhile)(1)
        policy.hang.release()
        await manager.wait()

        assert there(tmp_path) == (["1", "3"] if meanwhile == "pin" else ["3"])


async def test_what_became_the_last_step_while_it_is_decided_stays(tmp_path: Path) -> None:
    policy = Slow(3)
    async with CheckpointManager(tmp_path, keep=policy) as manager:
        await save(manager, 2)
        await save(manager, 3)
        await policy.hang.wait_reached()
        await manager.delete(3)
        policy.hang.release()
        await manager.wait()

        assert there(tmp_path) == ["2"]
        assert manager.latest_step() == 2


async def test_a_step_that_waits_to_be_deleted_is_not_listed(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        await save(manager, 1)
        held = LocalStore().hold_reading(str(tmp_path / "1"))
        await save(manager, 2)
        await manager.wait()
        assert there(tmp_path) == ["1", "2"]

        await manager.reload()
        assert list(manager.all_steps()) == [2]
        seen = [step async for step in manager.watch(after=0, timeout_s=0)]
        assert seen[0] == 1
        assert list(manager.all_steps()) == [2]
        held.release()
        await manager.wait()
        assert there(tmp_path) == ["2"]


async def test_a_step_that_waits_to_be_deleted_and_is_saved_anew_stays(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        await save(manager, 1)
        await save(manager, 2)
        held = LocalStore().hold_reading(str(tmp_path / "1"))
        async with anyio.create_task_group() as tasks:  # and whoever waits for its end goes on
            tasks.start_soon(manager.delete, 1)
            while 1 in manager.all_steps():
                await anyio.lowlevel.checkpoint()

            again = await manager.save(1, {"n": 10}, overwrite=True)
            assert again is not None
            await again

        held.release()
        await manager.wait()
        assert list(manager.all_steps()) == [1, 2]
        assert (await manager.restore(1))["n"] == 10


async def test_what_is_moved_away_is_durable_there(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    async with CheckpointManager(tmp_path, store=store, trash="old") as manager:
        await save(manager, 1)
        await save(manager, 2)
        await manager.delete(1)

    synced = [done.path for done in store.operations if done.name == "sync_directory"]
    assert synced[-2:] == [str(tmp_path), str(tmp_path / "old")]


async def test_the_metrics_of_a_step_that_was_overwritten_are_read_anew(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path, metric="loss") as manager:
        for step, loss in ((1, 1.0), (2, 2.0), (1, 3.0)):
            saving = await manager.save(step, {"n": step}, metrics={"loss": loss}, overwrite=True)
            assert saving is not None
            await saving
            assert await manager.best_step() == (2 if loss == 3.0 else 1)


async def test_a_policy_sees_the_saves_under_way(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    hang = store.hang_on("data.write_at")
    async with CheckpointManager(tmp_path, store=store, save_when=FirstSave()) as manager:
        assert await manager.save(1, {"n": 1}) is not None
        await hang.wait_reached()
        assert await manager.save(2, {"n": 2}) is None
        hang.release()


async def test_a_policy_sees_when_the_last_save_began(tmp_path: Path) -> None:
    class Recording:
        def __init__(self) -> None:
            self.moments: list[SaveMoment] = []

        def should_save(self, moment: SaveMoment, /) -> bool:
            self.moments.append(moment)
            return True

    policy = Recording()
    async with CheckpointManager(tmp_path, save_when=policy) as manager:
        await save(manager, 1)
        await save(manager, 2)

    first, second = policy.moments
    assert first.saved_s <= first.now_s < second.saved_s < second.now_s


async def test_what_is_wrong_with_the_new_step_is_not_laid_to_its_base(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    async with CheckpointManager(tmp_path, store=store) as manager:
        await save(manager, 1)
        error = StorageError("check", str(tmp_path / "2"), "no room")
        store.fail_on("check_writable", 2, error=error)
        with pytest.raises(StorageError) as raised:
            await manager.save(2, {"n": 2})

        assert raised.value is error


async def test_a_watcher_that_waits_for_the_next_step_holds_none(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        await save(manager, 1)
        watch = manager.watch(interval_s=0.01)
        assert await anext(watch) == 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, watch)
            await manager.delete(1)
            await save(manager, 2)


def test_a_step_without_a_time_of_commit_is_as_old_as_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": 5000000000}')

    assert StepReader(LocalStore()).info(str(tmp_path), 7, frozenset({"time"})) == StepInfo(7, 5.0)
