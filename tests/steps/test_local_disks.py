"""The managers of a job whose processes have a disk each: a folder here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.own_files import listed
from tests.steps.job_of_managers import COUNT, Managers, each, offer, opened, state

from penstock import Checkpointer, CheckpointManager, JobOptions
from penstock.config import Config
from penstock.errors import PeerFailedError, StorageError
from penstock.handlers import LocalStore
from penstock.kernel.protocols import DISK_MARK
from penstock.steps import KeepLast
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

Options = Callable[[int], dict[str, Any]]


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """The disk of each process. No two are called alike."""
    found = [tmp_path / f"disk of {index}" for index in range(COUNT)]
    for disk in found:
        disk.mkdir()

    return found


def on(disks: Sequence[Path], more: Options = lambda _: {}) -> Options:
    """Return options for managers that have a disk each."""

    def options(index: int) -> dict[str, Any]:
        job = JobOptions(local_root=os.fspath(disks[index]))
        return {"root": disks[index] / "run", "config": Config(job=job), **more(index)}

    return options


def there(disks: Sequence[Path]) -> list[list[str]]:
    """Return the steps on each disk."""
    return [listed(disk / "run") for disk in disks]


async def run(disks: Sequence[Path], *steps: int) -> None:
    """Save steps by all."""
    async with opened(disks[0], on(disks)) as managers:
        await offer(managers, *steps)


def known(managers: Managers) -> list[list[int]]:
    return [list(manager.all_steps()) for manager in managers]


async def test_each_disk_has_a_whole_checkpoint_of_what_its_process_holds(disks: list[Path]) -> None:
    await run(disks, 1, 2)
    assert there(disks) == [["1", "2"]] * COUNT
    saves = set[str]()
    for index, disk in enumerate(disks):
        async with Checkpointer() as checkpointer:
            np.testing.assert_array_equal(
                (await checkpointer.restore(disk / "run" / "2"))["x"], state(2)["x"]
            )
            assert (await checkpointer.verify(disk / "run" / "2")).intact

        mark = json.loads((disk / "run" / "2" / DISK_MARK).read_text())
        assert (mark["process"], mark["processes"]) == (index, list(range(COUNT)))
        saves.add(mark["save"])

    assert len(saves) == 1


async def test_what_only_some_have_is_never_offered_and_removed_at_the_next_opening(
    disks: list[Path],
) -> None:
    await run(disks, 1, 2, 3, 4)
    shutil.rmtree(disks[1] / "run" / "4")
    shutil.rmtree(disks[2] / "run" / "2")
    async with opened(disks[0], on(disks)) as managers:
        assert known(managers) == [[1, 3]] * COUNT
        assert there(disks) == [["1", "3"]] * COUNT
        assert await offer(managers, 4) == [4]
        for manager in managers:
            np.testing.assert_array_equal((await manager.restore())["x"], state(4)["x"])


async def test_what_only_some_have_stays_if_nothing_is_to_be_cleaned(disks: list[Path]) -> None:
    await run(disks, 1, 2)
    shutil.rmtree(disks[2] / "run" / "2")
    for more in ({"clean": False}, {"read_only": True}):

        def options(_: int, more: dict[str, Any] = more) -> dict[str, Any]:
            return more

        async with opened(disks[0], on(disks, options)) as managers:
            assert known(managers) == [[1]] * COUNT

    assert there(disks) == [["1", "2"], ["1", "2"], ["1"]]


async def test_parts_of_different_saves_are_no_step(disks: list[Path]) -> None:
    await run(disks, 1, 2)
    kept = disks[0] / "kept"
    shutil.copytree(disks[0] / "run" / "2", kept)
    for disk in disks:
        shutil.rmtree(disk / "run" / "2")

    await run(disks, 2)
    shutil.rmtree(disks[0] / "run" / "2")
    kept.rename(disks[0] / "run" / "2")
    async with opened(disks[0], on(disks)) as managers:
        assert known(managers) == [[1]] * COUNT

    assert there(disks) == [["1"]] * COUNT


async def test_what_is_no_part_of_these_processes_is_not_removed(disks: list[Path]) -> None:
    """Steps of a process alone, steps of other disks, and steps whose mark is damaged."""
    await run(disks, 1, 2, 3)
    async with Checkpointer() as checkpointer:
        await (await checkpointer.save(disks[0] / "run" / "4", state(4)))
        for disk in disks:
            await (await checkpointer.save(disk / "run" / "5", state(5)))

    first, second = disks[0] / "run" / "2", disks[1] / "run" / "2"
    first.rename(disks[0] / "swapped")
    second.rename(first)
    (disks[0] / "swapped").rename(second)
    mark = disks[2] / "run" / "3" / DISK_MARK
    mark.write_text(mark.read_text().replace('"process":2', '"process":1'))
    async with opened(disks[0], on(disks)) as managers:
        assert known(managers) == [[1, 5]] * COUNT

    assert there(disks) == [["1", "2", "4", "5"], ["1", "2", "5"], ["1", "3", "5"]]


async def test_all_processes_delete_the_same_steps(disks: list[Path]) -> None:
    async with opened(disks[0], on(disks, lambda index: {"keep": KeepLast(1 + index)})) as managers:
        managers[0].pin(1)
        await offer(managers, *range(4))
        await each(managers, lambda manager: manager.wait())
        assert known(managers) == [[1, 3]] * COUNT

    assert there(disks) == [["1", "3"]] * COUNT


@pytest.mark.parametrize("operation", ["data.sync", "publish"])
@pytest.mark.parametrize("who", [0, COUNT - 1])
async def test_a_failure_on_one_disk_ends_the_save_for_all(
    disks: list[Path], operation: str, who: int
) -> None:
    stores = [FaultyStore(LocalStore()) for _ in disks]
    told = dict[int, BaseException]()
    async with opened(disks[0], on(disks, lambda index: {"store": stores[index]})) as managers:
        await offer(managers, 1)
        n_before = len([each for each in stores[who].operations if each.name == operation])
        stores[who].fail_on(operation, n_before + 1)

        async def fail(manager: CheckpointManager) -> None:
            try:
                save = await manager.save(
                    2, state(2)
                )  # where a process that is not yet staged may hear of it
                assert save is not None
                await save
            except (StorageError, PeerFailedError) as error:
                told[managers.index(manager)] = error

        await each(managers, fail)
        assert isinstance(told.pop(who), StorageError)
        assert [(type(error), error.processes) for error in told.values()] == [  # type: ignore[attr-defined]
            (PeerFailedError, (who,))
        ] * (COUNT - 1)
        assert there(disks) == [["1"]] * COUNT
        assert known(managers) == [[1]] * COUNT
        assert await offer(managers, 2) == [2]

    assert there(disks) == [["1", "2"]] * COUNT


async def test_an_overwritten_step_counts_once_all_have_overwritten_it(disks: list[Path]) -> None:
    stores = [FaultyStore(LocalStore()) for _ in disks]
    async with opened(disks[0], on(disks, lambda index: {"store": stores[index]})) as managers:
        await offer(managers, 1, 2)
        stores[1].fail_on("exchange")

        async def overwrite(manager: CheckpointManager) -> None:
            save = await manager.save(2, state(20), overwrite=True)
            assert save is not None
            with pytest.raises((StorageError, PeerFailedError)):
                await save

        await each(managers, overwrite)
        assert known(managers) == [[1]] * COUNT

    async with opened(disks[0], on(disks)) as managers:
        assert known(managers) == [[1]] * COUNT


async def test_a_path_elsewhere_is_of_all(disks: list[Path], tmp_path: Path) -> None:
    def options(index: int) -> dict[str, Any]:
        return {**on(disks)(index), "root": tmp_path / "shared"}

    async with opened(tmp_path / "shared", options) as managers:
        await offer(managers, 1)
        assert known(managers) == [[1]] * COUNT

    assert not (tmp_path / "shared" / "1" / DISK_MARK).exists()
