"""A save that does not fit says so before it begins; one that is stopped names the leaf and the room."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.own_files import listed

import penstock
from penstock import SaveFormat
from penstock.errors import NoSpaceError, StorageError
from penstock.handlers import LocalStore
from penstock.kernel import StoreWrapper
from penstock.steps import CheckpointManager, KeepLast
from penstock.testing import FaultyStore, MemoryStore

pytestmark = pytest.mark.anyio
ITEM = 4 * 100_000


def state(fill: float = 1.0) -> dict[str, Any]:
    return {name: np.full(ITEM // 4, fill, np.float32) for name in ("a", "b", "c")}


class Room(StoreWrapper):
    """The local store, with as much room as a test says."""

    def __init__(self, free: Callable[[], int | None]) -> None:
        super().__init__(LocalStore())
        self.free = free

    def free_bytes(self, path: str) -> int | None:
        super().free_bytes(path)  # which must not fail
        return self.free()


def with_room(free: int | None) -> FaultyStore:
    return FaultyStore(Room(lambda: free))


async def test_a_save_that_does_not_fit_is_refused_before_it_begins(tmp_path: Path) -> None:
    store = with_room(2 * ITEM + 5)
    async with penstock.Checkpointer(store=store) as checkpointer:
        with pytest.raises(NoSpaceError) as caught:
            await checkpointer.save(tmp_path / "one", state())

    error = caught.value
    assert (error.errno, error.bytes_needed, error.bytes_free) == (errno.ENOSPC, 3 * ITEM, 2 * ITEM + 5)
    assert (error.key_path, error.path) == ("['c']", str(tmp_path / "one"))
    assert "1200000 bytes are needed and 800005 are free, from leaf ['c'] on" in str(error)
    assert not any(operation.name == "make_directory" for operation in store.operations)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("free", [3 * ITEM, None])
async def test_a_save_that_just_fits_or_whose_store_does_not_know_goes_on(tmp_path: Path, free: Any) -> None:
    store = with_room(free)
    async with penstock.Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(tmp_path / "one", state()))


async def test_what_is_linked_does_not_count(tmp_path: Path) -> None:
    tree = state()
    room = Room(lambda: None)
    async with penstock.Checkpointer(store=FaultyStore(room)) as checkpointer:
        await (await checkpointer.save(tmp_path / "one", tree, compare="digest"))
        room.free = lambda: ITEM
        tree["b"] = tree["b"] + 1
        await (await checkpointer.save(tmp_path / "two", tree, base=tmp_path / "one", compare="digest"))
        room.free = lambda: ITEM - 1
        with pytest.raises(NoSpaceError) as caught:
            await checkpointer.save(tmp_path / "three", tree, base=tmp_path / "one", compare="digest")

    assert (caught.value.bytes_needed, caught.value.key_path) == (ITEM, "['b']")


async def test_with_a_codec_it_is_not_refused_but_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = SaveFormat(codec="zstd")
    async with penstock.Checkpointer(store=with_room(ITEM), save_format=form) as checkpointer:
        await (await checkpointer.save(tmp_path / "one", state()))

    assert "save.may_not_fit" in caplog.text


@pytest.mark.parametrize("ocdbt", [True, False])
async def test_a_disk_that_fills_up_meanwhile_is_named_with_the_leaf(tmp_path: Path, ocdbt: bool) -> None:
    store = FaultyStore(LocalStore())
    name = "data.write_at" if ocdbt else "write_file"
    store.fail_on(name, 1, StorageError("write", "file", "No space left on device", errno.ENOSPC))
    async with penstock.Checkpointer(store=store, save_format=SaveFormat(ocdbt=ocdbt)) as checkpointer:
        save = checkpointer.save(tmp_path / "one", state())
        with pytest.raises(NoSpaceError) as caught:
            await (await save)

    error = caught.value
    assert (error.operation, error.path, error.stage) == ("write", "file", "write")
    assert error.key_path in {"['a']", "['b']", "['c']"}
    assert error.bytes_needed <= 3 * ITEM
    assert error.bytes_free is not None
    assert os.listdir(tmp_path) == []


async def test_a_store_of_limited_capacity(tmp_path: Path) -> None:
    async with penstock.Checkpointer(store=MemoryStore(capacity_bytes=4 * ITEM)) as checkpointer:
        await (await checkpointer.save("/run/1", state()))
        with pytest.raises(NoSpaceError) as caught:
            await checkpointer.save("/run/2", state())

    assert caught.value.bytes_needed == 3 * ITEM
    assert caught.value.bytes_free is not None
    assert caught.value.bytes_free < ITEM


async def test_a_manager_waits_for_the_room_that_deletions_give(tmp_path: Path) -> None:
    room = Room(lambda: None)
    store = FaultyStore(room)
    async with CheckpointManager(tmp_path, store=store, keep=KeepLast(1), link=False) as manager:
        first = await manager.save(1, state())
        assert first is not None
        await first
        reading = store.hold_reading(str(tmp_path / "1"))
        second = await manager.save(2, state())
        assert second is not None
        await second
        await manager.wait()  # the first one is due for deletion, and being read
        reading.release()
        room.free = lambda: 0 if (tmp_path / "1").exists() else 10 * ITEM
        third = await manager.save(3, state())
        assert third is not None
        await third

    assert listed(tmp_path) == ["3"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where it can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")

    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_a_real_disk_that_is_too_small_refuses_the_save(small_disk: Path) -> None:
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(small_disk / "one", {"a": state()["a"]}))
        with pytest.raises(NoSpaceError) as caught:
            await checkpointer.save(small_disk / "two", state())

        assert (caught.value.bytes_needed, caught.value.key_path) == (3 * ITEM, "['b']")
        assert caught.value.bytes_free is not None
        assert sorted(os.listdir(small_disk)) == ["one"]
        await checkpointer.restore(small_disk / "one")

    noise = {"x": np.random.default_rng(0).integers(0, 255, 2 * ITEM, np.uint8)}  # no codec makes it smaller
    async with penstock.Checkpointer(save_format=SaveFormat(codec="zstd")) as checkpointer:
        save = await checkpointer.save(small_disk / "two", noise)
        with pytest.raises(NoSpaceError):
            await save

    assert sorted(os.listdir(small_disk)) == ["one"]
