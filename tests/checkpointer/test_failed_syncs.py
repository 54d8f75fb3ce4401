"""The directory above a checkpoint cannot be synced once the checkpoint is visible there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.own_files import listed

import penstock
from penstock.errors import NoSpaceError, NotDurableError, StepExistsError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores.file_system import SystemCalls
from penstock.handlers.stores.publishing.deletion import delete_file, remove_abandoned
from penstock.steps import KeepLast
from penstock.testing import CrashStore

pytestmark = pytest.mark.anyio


def tree(number: int) -> dict[str, Any]:
    return {"a": np.full(3, number)}


class Disk:
    """A store on which one directory cannot be synced, as long as that is so."""

    def __init__(self, directory: Path, number: int = errno.EIO) -> None:
        self.directory = directory
        self.number = number
        self.fails = False
        self.store = LocalStore(calls=SystemCalls(fsync=self._fsync))

    def _fsync(self, number: int) -> None:
        if self.fails and os.path.samestat(os.fstat(number), os.stat(self.directory)):
            raise OSError(self.number, os.strerror(self.number))

        os.fsync(number)


async def number_at(path: Path | str) -> int:
    return int((await penstock.restore(path))["a"][0])


async def test_a_failed_sync_says_that_the_new_checkpoint_is_there_and_keeps_the_replaced_one(
    folder: Path,
) -> None:
    folder.mkdir()
    path, disk = folder / "latest", Disk(folder)
    async with penstock.Checkpointer(store=disk.store) as checkpointer:

        async def save(number: int) -> None:
            await (await checkpointer.save(path, tree(number), overwrite=True))

        await save(1)
        disk.fails = True
        with pytest.raises(NotDurableError, match="may be lost if the power fails") as caught:
            await save(2)

        assert (caught.value.published, caught.value.errno, caught.value.path) == (True, errno.EIO, str(path))
        assert await number_at(path) == 2
        older = caught.value.older
        assert older is not None
        assert older in str(caught.value)
        for _ in range(2):  # no later save deletes it, as long as the name of the new one is not durable
            with pytest.raises(StorageError):
                await save(3)
            assert await number_at(path) == 2
            os.rename(older, folder / "older")
            assert await number_at(folder / "older") == 1
            os.rename(folder / "older", older)

        disk.fails = False
        await save(4)

    assert await number_at(path) == 4
    assert os.listdir(folder) == ["latest"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_where_nothing_was_before_the_new_one_is_there(folder: Path, number: int) -> None:
    """Also on a full disk it is not said that the save was undone."""
    folder.mkdir()
    path, disk = folder / "latest", Disk(folder, number)
    async with penstock.Checkpointer(store=disk.store) as checkpointer:
        disk.fails = True
        save = await checkpointer.save(path, tree(1))
        with pytest.raises(NotDurableError) as caught:
            await save

        assert not isinstance(caught.value, NoSpaceError)
        assert caught.value.older is None
        assert save.published
        assert save.status == "failed"
        assert await number_at(path) == 1
        disk.fails = False
        again = await checkpointer.save(path, tree(2), overwrite=True)
        await again
        assert again.published


async def test_a_manager_lists_the_step_and_saves_it_again(folder: Path) -> None:
    disk = Disk(folder)
    async with penstock.CheckpointManager(folder, store=disk.store, keep=KeepLast(1)) as manager:

        async def save(step: int, number: int) -> None:
            future = await manager.save(step, tree(number))
            assert future is not None
            await future

        await save(1, 1)
        disk.fails = True
        with pytest.raises(NotDurableError):
            await save(2, 2)

        assert manager.all_steps() == (1, 2), "what is there, is listed, and nothing is deleted for it"
        assert manager.latest_step() == 2
        assert manager.should_save(2)
        with pytest.raises(StorageError):
            await save(2, 22)

        assert manager.all_steps() == (1, 2)
        disk.fails = False
        await save(2, 222)
        await manager.wait()
        assert manager.all_steps() == (2,)
        assert (await manager.restore())["a"][0] == 222
        with pytest.raises(StepExistsError):
            await manager.save(2, tree(3))

    assert listed(folder) == ["2"]


async def test_a_later_step_makes_the_name_of_the_earlier_one_durable(folder: Path) -> None:
    disk = Disk(folder)
    async with penstock.CheckpointManager(folder, store=disk.store) as manager:
        disk.fails = True
        future = await manager.save(1, tree(1))
        assert future is not None
        with pytest.raises(NotDurableError):
            await future
        disk.fails = False
        future = await manager.save(2, tree(2))
        assert future is not None
        await future
        with pytest.raises(StepExistsError):
            await manager.save(1, tree(3))
        assert manager.all_steps() == (1, 2)


async def test_what_a_save_left_is_removed_only_once_the_name_of_the_new_one_is_durable(folder: Path) -> None:
    """A saver that is killed between the exchange and the sync leaves the earlier state there."""
    folder.mkdir()
    path = folder / "latest"
    store = CrashStore(LocalStore(), folder)
    async with penstock.Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(path, tree(1)))
        built = folder / "latest.orbax-checkpoint-tmp"
        await (await checkpointer.save(folder / "made", tree(2)))
        token = store.begin_build(str(path), str(built))
        store.rename(str(folder / "made"), str(built))
        store.sync_directory(str(folder))
        held = store.hold(str(built))
        store.exchange(token)
        held.release()  # it is killed here
        remove_abandoned(store, str(built))

    store.lose_power()
    assert await number_at(path) == 2


def test_a_file_that_is_deleted_keeps_its_bytes_until_that_is_durable(folder: Path) -> None:
    folder.mkdir()
    file, hidden, disk = folder / "a.safetensors", folder / "hidden", Disk(folder)
    file.write_bytes(b"bytes")
    disk.fails = True
    with pytest.raises(StorageError):
        delete_file(disk.store, str(file), str(hidden))

    left = [*folder.rglob("*.safetensors")]
    assert [path.read_bytes() for path in left] == [b"bytes"]
