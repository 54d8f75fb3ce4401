"""Another program renames, removes or swaps what a save builds, or has just published."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import penstock
from penstock.errors import BuildChangedError, IncompleteCheckpointError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores.file_system import exchange
from penstock.handlers.stores.publishing.deletion import delete_checkpoint
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio


def tree(number: int) -> dict[str, Any]:
    return {"a": np.full(3, number), "b": np.full(5, number)}


async def save(checkpointer: penstock.Checkpointer, path: Path, number: int) -> None:
    await (await checkpointer.save(path, tree(number), overwrite=True))


async def number_at(path: Path) -> int:
    found = await penstock.restore(path)
    assert np.array_equal(found["b"], np.full(5, found["a"][0]))
    return int(found["a"][0])


def rename(path: Path, build: Path) -> None:
    os.rename(build, path.parent / "elsewhere")


def remove(path: Path, build: Path) -> None:
    shutil.rmtree(build)


def swap(path: Path, build: Path) -> None:
    os.mkdir(path.parent / "elsewhere")
    exchange(str(path.parent / "elsewhere"), str(build))


def remove_a_file(path: Path, build: Path) -> None:
    os.unlink(build / "commit_success.txt")


def swap_what_is_there(path: Path, build: Path) -> None:
    shutil.copytree(path, path.parent / "elsewhere")
    exchange(str(path.parent / "elsewhere"), str(path))


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("meddle", [rename, remove, swap, remove_a_file])
async def test_what_was_not_built_is_not_published(
    folder: Path, meddle: Callable[[Path, Path], None], *, is_there: bool
) -> None:
    folder.mkdir()
    path, build = folder / "latest", folder / "latest.orbax-checkpoint-tmp"
    store = FaultyStore(LocalStore())
    async with penstock.Checkpointer(store=store) as checkpointer:
        if is_there:
            await save(checkpointer, path, 1)

        hang = store.hang_on("exchange" if is_there else "publish")
        async with anyio.create_task_group() as tasks:

            async def refused() -> None:
                with pytest.raises(BuildChangedError, match=r"another program|not there any more"):
                    await save(checkpointer, path, 2)

            tasks.start_soon(refused)
            await hang.wait_reached()
            meddle(path, build)
            hang.release()

        assert path.exists() is is_there
        if is_there:
            assert await number_at(path) == 1
        await save(checkpointer, path, 3)

    assert await number_at(path) == 3


@pytest.mark.parametrize("at", ["sync_directory", "discard"])
@pytest.mark.parametrize(
    ("meddle", "older"), [("rename", "there"), ("swap", "aside"), ("remove a file", "there")]
)
async def test_what_is_replaced_is_deleted_only_once_the_new_one_was_seen(
    folder: Path, at: str, meddle: str, older: str
) -> None:
    folder.mkdir()
    path = folder / "latest"
    store = FaultyStore(LocalStore())
    caught: list[BuildChangedError] = []
    async with penstock.Checkpointer(store=store) as checkpointer:
        await save(checkpointer, path, 1)
        await save(checkpointer, folder / "counted", 1)
        done = [operation.name for operation in store.operations]
        hang = store.hang_on("discard") if at == "discard" else None
        if hang is None:
            n_syncs = done.count("sync_directory") // 2  # of each save, the last one is of the parent
            hang = store.hang_on("sync_directory", done.count("sync_directory") + n_syncs)

        async with anyio.create_task_group() as tasks:

            async def refused() -> None:
                with pytest.raises(BuildChangedError) as raised:
                    await save(checkpointer, path, 2)

                caught.append(raised.value)

            tasks.start_soon(refused)
            await hang.wait_reached()
            assert await number_at(path) == 2
            if meddle == "rename":
                os.rename(path, folder / "elsewhere")
            elif meddle == "swap":
                swap_what_is_there(path, path)
            else:
                os.unlink(path / "commit_success.txt")

            hang.release()

        if older == "there":
            assert await number_at(path) == 1
            assert caught[0].older is None
            assert "the earlier checkpoint is there again" in str(caught[0])
        else:
            assert caught[0].older is not None
            assert await number_at(Path(caught[0].older)) == 1
            assert await number_at(path) == 2

        await save(checkpointer, path, 3)

    assert await number_at(path) == 3
    if caught[0].older is not None:
        assert await number_at(Path(caught[0].older)) == 1, "no later save deletes it"


async def test_a_deletion_removes_only_what_it_holds(folder: Path) -> None:
    folder.mkdir()
    path = folder / "1"
    store = FaultyStore(LocalStore())
    async with penstock.Checkpointer() as checkpointer:
        await save(checkpointer, path, 1)

    hang = store.hang_on("rename")
    async with anyio.create_task_group() as tasks:

        async def refused() -> None:
            with pytest.raises(BuildChangedError):
                await anyio.to_thread.run_sync(delete_checkpoint, store, str(path), str(folder / "hidden"))

        tasks.start_soon(refused)
        await hang.wait_reached()
        swap_what_is_there(path, path)
        hang.release()

    assert await number_at(path) == 1
    assert sorted(os.listdir(folder)) == ["1", "elsewhere"]


async def test_who_reads_a_path_whose_first_save_goes_on_hears_of_that(folder: Path) -> None:
    folder.mkdir()
    path, build = folder / "latest", folder / "latest.orbax-checkpoint-tmp"
    store = FaultyStore(LocalStore())
    hang = store.hang_on("publish")
    async with penstock.Checkpointer(store=store) as checkpointer, anyio.create_task_group() as tasks:
        tasks.start_soon(save, checkpointer, path, 1)
        await hang.wait_reached()
        for asked in (path, build):
            with pytest.raises(IncompleteCheckpointError, match="its save goes on") as caught:
                await penstock.restore(asked)
            assert caught.value.goes_on
        hang.release()

    os.rename(path, build)
    for asked in (path, build):
        with pytest.raises(IncompleteCheckpointError, match="interrupted") as caught:
            await penstock.restore(asked)
        assert not caught.value.goes_on


async def test_what_another_user_left_is_set_aside_and_can_be_overwritten_again_and_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a directory of ours, what another user has saved may be renamed, and not removed."""
    folder.mkdir()
    path = folder / "latest"
    store = FaultyStore(LocalStore())
    denied = StorageError("remove", str(path), "Permission denied", 13)
    async with penstock.Checkpointer(store=store) as checkpointer:
        await save(checkpointer, path, 1)
        store.fail_on("discard", error=denied)
        await save(checkpointer, path, 2)
        assert "save.left_behind" in caplog.text
        store.fail_on("remove_tree", error=denied)
        await save(checkpointer, path, 3)
        await save(checkpointer, path, 4)

    assert await number_at(path) == 4
    (left,) = set(os.listdir(folder)) - {"latest"}
    assert left.startswith("latest.orbax-checkpoint-tmp-")
    assert caplog.text.count("save.left_behind") == 2
