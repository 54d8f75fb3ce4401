"""Saves to a path that is a symbolic link: the link is replaced, and what it leads to stays."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import numpy as np
import pytest

from penstock import Checkpointer
from penstock.errors import DestinationExistsError
from penstock.handlers import LocalStore
from penstock.handlers.stores.file_system import rename_to_absent
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio


async def save(checkpointer: Checkpointer, path: Path, number: int, *, overwrite: bool = True) -> None:
    await (await checkpointer.save(path, {"n": np.full(3, number)}, overwrite=overwrite))


async def number_in(checkpointer: Checkpointer, path: Path) -> int:
    return int((await checkpointer.restore(path))["n"][0])


async def test_overwriting_through_a_link_replaces_the_link_each_time(folder: Path) -> None:
    folder.mkdir()
    latest, elsewhere = folder / "latest", folder / "elsewhere"
    async with Checkpointer() as checkpointer:
        await save(checkpointer, elsewhere, 7)
        for number in (1, 2, 3):
            if latest.exists():
                latest.rename(folder / str(number))
            latest.symlink_to("elsewhere")
            with pytest.raises(DestinationExistsError):
                await save(checkpointer, latest, 0, overwrite=False)

            await save(checkpointer, latest, number)
            assert not latest.is_symlink()
            await save(checkpointer, latest, number * 10)  # which is no link any more
            assert await number_in(checkpointer, latest) == number * 10
            assert await number_in(checkpointer, elsewhere) == 7

    assert sorted(os.listdir(folder)) == ["2", "3", "elsewhere", "latest"]


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_link_that_leads_nowhere_is_nothing(folder: Path, *, overwrite: bool) -> None:
    folder.mkdir()
    (folder / "latest").symlink_to("nowhere")
    async with Checkpointer() as checkpointer:
        await save(checkpointer, folder / "latest", 1, overwrite=overwrite)
        assert await number_in(checkpointer, folder / "latest") == 1

    assert os.listdir(folder) == ["latest"]


async def test_of_two_that_save_where_a_link_leads_nowhere_one_is_refused(folder: Path) -> None:
    folder.mkdir()
    path = folder / "latest"
    path.symlink_to("nowhere")
    store = FaultyStore(LocalStore())
    hang = store.hang_on("publish")
    async with Checkpointer(store=store) as one, Checkpointer() as other:

        async def refused() -> None:
            with pytest.raises(DestinationExistsError):
                await save(one, path, 1, overwrite=False)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refused)
            await hang.wait_reached()
            path.unlink()
            await save(other, folder / "by-another", 2)
            (folder / "by-another").rename(path)
            hang.release()

        assert await number_in(other, path) == 2

    assert os.listdir(folder) == ["latest"]


def test_a_link_that_leads_somewhere_is_never_replaced_by_a_rename(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(FileExistsError):
        rename_to_absent(str(tmp_path / "new"), str(tmp_path / "link"))

    assert sorted(os.listdir(tmp_path)) == ["link", "new"]
