"""Steps that are deleted: failures and hangs in the midst of it, and steps that are links."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from anyio.lowlevel import checkpoint
from tests.own_files import listed

from penstock.config import Config, StoppingOptions
from penstock.errors import ClosedError
from penstock.handlers import LocalStore
from penstock.kernel import Threads
from penstock.steps import CheckpointManager, KeepLast
from penstock.steps.step_deletion import Deleter
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

IMPATIENT = Config(stopping=StoppingOptions(read_s=0.01, delete_s=0.01))


def there(root: Path) -> list[str]:
    return listed(root)


async def save(manager: CheckpointManager, step: int, fill: int | None = None, **options: Any) -> None:
    saving = await manager.save(step, {"n": step if fill is None else fill}, **options)
    assert saving is not None
    await saving


@pytest.mark.parametrize("at", ["sync_directory", "remove_tree"])
async def test_a_step_whose_deletion_fails_after_the_rename_is_no_step(tmp_path: Path, at: str) -> None:
    store = FaultyStore(LocalStore())
    async with CheckpointManager(tmp_path, store=store) as manager:
        await save(manager, 1)
        await save(manager, 2)
        count = [operation.name for operation in store.operations].count(at)
        store.fail_on(at, count + 1)
        await manager.delete(2)
        assert there(tmp_path) == ["1", "deleted_2.orbax-checkpoint-tmp"]
        for _ in range(2):
            assert (list(manager.all_steps()), manager.latest_step()) == ([1], 1)
            await manager.reload()

        await save(manager, 2, 7)
        assert (await manager.restore())["n"] == 7
        await manager.delete(2)  # which removes what the first deletion left, too
        assert there(tmp_path) == ["1"]


@pytest.mark.parametrize("trash", [None, "gone"])
async def test_of_a_step_that_is_a_link_only_the_link_is_replaced_and_deleted(
    tmp_path: Path, trash: str | None
) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    async with CheckpointManager(elsewhere) as manager:
        await save(manager, 5, 50)

    async with CheckpointManager(root, trash=trash) as manager:
        for _ in range(2):
            (root / "5").symlink_to(elsewhere / "5")
            await manager.reload()
            await save(manager, 5, 51, overwrite=True)
            assert not (root / "5").is_symlink()
            assert (await manager.restore(5))["n"] == 51
            await manager.delete(5)

            (root / "5").symlink_to(elsewhere / "5")
            await manager.reload()
            await manager.delete(5)
            assert there(root) == ([] if trash is None else [trash])

    async with CheckpointManager(elsewhere, read_only=True) as manager:
        assert (await manager.restore(5))["n"] == 50
        assert listed(elsewhere) == ["5"]


async def test_a_link_that_leads_nowhere_is_in_no_deletions_way(tmp_path: Path) -> None:
    """A crash between the two halves of the deletion of a link leaves one, when its target goes."""
    for trash, hidden in ((None, "deleted_1.orbax-checkpoint-tmp"), ("gone", "gone/1")):
        async with CheckpointManager(tmp_path, trash=trash) as manager:
            await save(manager, 1)
            (tmp_path / hidden).parent.mkdir(exist_ok=True)
            (tmp_path / hidden).symlink_to("nowhere")
            await manager.delete(1)
            assert list(manager.all_steps()) == []

    assert there(tmp_path) == ["gone"]
    assert os.listdir(tmp_path / "gone") == ["1"]
    assert not (tmp_path / "gone" / "1").is_symlink()


@pytest.mark.parametrize("at", ["rename", "remove_tree"])
async def test_leaving_does_not_wait_for_a_deletion_that_hangs(tmp_path: Path, at: str) -> None:
    store = FaultyStore(LocalStore())
    async with CheckpointManager(tmp_path, store=store, keep=KeepLast(1), config=IMPATIENT) as manager:
        await save(manager, 1)
        hang = store.hang_on(at, [operation.name for operation in store.operations].count(at) + 1)
        await save(manager, 2)
        await hang.wait_reached()

    assert "2" in there(tmp_path)
    async with CheckpointManager(tmp_path) as manager:  # it holds the root no more
        assert manager.latest_step() == 2

    hang.release()
    await until(lambda: there(tmp_path) == ["2"])


async def test_who_waits_for_a_deletion_is_told_that_it_was_not_done(tmp_path: Path) -> None:
    told: list[ClosedError] = []

    async def delete(manager: CheckpointManager) -> None:
        try:
            await manager.delete(1)
        except ClosedError as error:
            told.append(error)

    async with anyio.create_task_group() as tasks:
        async with CheckpointManager(tmp_path) as manager:
            await save(manager, 1)
            await save(manager, 2)
            held = LocalStore().hold_reading(str(tmp_path / "1"))
            tasks.start_soon(delete, manager)
            await until(lambda: list(manager.all_steps()) == [2])

        held.release()

    assert "before step 1 could be deleted" in str(told[0])
    assert there(tmp_path) == ["1", "2"]


async def test_a_deletion_that_is_left_begins_nothing_any_more(tmp_path: Path) -> None:
    """Somebody else may have saved that step anew by then."""
    store = FaultyStore(LocalStore())
    events: Any = structlog.get_logger()

    def deleter(trash: str | None) -> Deleter:
        return Deleter(
            store, Threads(), str(tmp_path), trash=trash, events=events, on_outcome=lambda *_: None
        )

    for trash in (None, "gone"):
        (tmp_path / "1").mkdir(exist_ok=True)
        hang = store.hang_on("hold", [operation.name for operation in store.operations].count("hold") + 1)
        wanted = deleter(trash)
        async with anyio.create_task_group() as tasks:
            wanted.ask({1: "1"})
            tasks.start_soon(wanted.attempt)
            await hang.wait_reached()
            wanted.end()
            hang.release()

        assert (tmp_path / "1").exists()

    wanted = deleter(None)
    wanted.ask({1: "1"})
    await wanted.attempt()
    assert not (tmp_path / "1").exists()


async def test_a_process_that_leaves_deletions_to_another_only_forgets_the_steps(tmp_path: Path) -> None:
    told: list[tuple[object, ...]] = []
    events: Any = structlog.get_logger()
    deleter = Deleter(
        LocalStore(),
        Threads(),
        str(tmp_path),
        trash=None,
        events=events,
        on_outcome=lambda *outcome: told.append(outcome),
        deletes=False,
    )
    (tmp_path / "1").mkdir()
    deleter.ask({1: "1"})
    await deleter.attempt()

    assert told == [(1, "1", None)]
    assert not deleter.waiting
    assert (tmp_path / "1").exists()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await checkpoint()


async def test_a_step_that_is_saved_again_waits_for_its_deletion(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore())
    async with CheckpointManager(tmp_path, store=store, config=IMPATIENT) as manager:
        await save(manager, 1, 10)
        await save(manager, 2)
        hang = store.hang_on("rename", [operation.name for operation in store.operations].count("rename") + 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.delete, 1)
            await hang.wait_reached()
            tasks.start_soon(partial(save, manager, 1, 11, overwrite=True))
            await anyio.wait_all_tasks_blocked()
            assert list(manager.saving) == [1]
            hang.release()

        assert (await manager.restore(1))["n"] == 11
        assert list(manager.all_steps()) == [1, 2]

    assert there(tmp_path) == ["1", "2"]
