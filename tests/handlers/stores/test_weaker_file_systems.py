"""File systems that refuse a call: what there is, is used, and what is weaker is logged once."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.own_files import listed

import penstock
from penstock.errors import NotDurableError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores.file_system import SystemCalls

pytestmark = pytest.mark.anyio


def refuse(number: int) -> Any:
    """Return a call that the file system refuses."""

    def call(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def minus_one(_: str) -> os.statvfs_result:
    return os.statvfs_result((2**64 - 1,) * 10)


def negative(_: str) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, -1, -1, -1, -1, -1, -1, -1, 255))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("calls", "lacks"),
    [
        (SystemCalls(renameat2=refuse(errno.EPERM)), "renameat2"),
        (SystemCalls(renameat2=refuse(errno.EINVAL)), "renameat2"),
        (SystemCalls(fsync=refuse(errno.EINVAL)), "fsync"),
        (SystemCalls(fsync=refuse(errno.ENOTSUP)), "fsync"),
        (SystemCalls(fsync=refuse(errno.ENOSYS)), "fsync"),
        (SystemCalls(statvfs=minus_one), "statvfs"),
        (SystemCalls(statvfs=negative), "statvfs"),
        (SystemCalls(statvfs=refuse(errno.ENOSYS)), "statvfs"),
        (SystemCalls(flock=refuse(errno.ENOLCK)), "flock"),
    ],
)
async def test_a_weaker_file_system_is_saved_to_overwritten_and_deleted_from_and_logged_once(
    tmp_path: Path, calls: SystemCalls, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(calls=calls)
    async with penstock.CheckpointManager(tmp_path, store=store) as manager:
        for step in (1, 2):
            await _done(manager.save(step, {"a": np.full(3, step)}))

        await _done(manager.save(2, {"a": np.full(3, 22)}, overwrite=True))
        assert (await manager.restore(2))["a"][0] == 22
        await manager.delete(1)

    assert listed(tmp_path) == ["2"]
    assert caplog.text.count("store.weaker") == 1
    assert f"lacks='{lacks}'" in caplog.text or f"lacks={lacks}" in caplog.text


async def _done(save: Any) -> None:
    await (await save)


def test_what_statvfs_does_not_say_is_unknown(tmp_path: Path) -> None:
    for call in (minus_one, negative, refuse(errno.ENOSYS), refuse(errno.EPERM)):
        store = LocalStore(calls=SystemCalls(statvfs=call))
        store.check_writable(str(tmp_path / "new"))
        assert store.free_bytes(str(tmp_path)) is None

    with pytest.raises(StorageError) as caught:
        LocalStore(calls=SystemCalls(statvfs=refuse(errno.EIO))).free_bytes(str(tmp_path))
    assert caught.value.errno == errno.EIO


async def test_a_directory_that_could_not_be_synced_is_another_matter(tmp_path: Path) -> None:
    failing: list[bool] = []

    def fsync(number: int) -> None:
        if failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.fsync(number)

    async with penstock.Checkpointer(store=LocalStore(calls=SystemCalls(fsync=fsync))) as checkpointer:
        await _done(checkpointer.save(tmp_path / "a", {"a": 1}))
        failing.append(True)
        with pytest.raises(StorageError) as caught:
            await _done(checkpointer.save(tmp_path / "a", {"a": 2}, overwrite=True))

    assert caught.value.errno == errno.EIO
    assert not isinstance(caught.value, NotDurableError), "the directory of the build came first"


def test_a_directory_whose_name_could_not_be_made_durable_is_not_left_there(tmp_path: Path) -> None:
    """Else the next save would find it there, and take it for durable."""
    store = LocalStore(calls=SystemCalls(fsync=refuse(errno.EIO)))
    with pytest.raises(StorageError):
        store.make_directory(str(tmp_path / "a" / "b"))

    assert os.listdir(tmp_path) == []


def test_what_is_not_permitted_is_not_a_weaker_file_system(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`os.rename` says so, too."""
    store = LocalStore(calls=SystemCalls(renameat2=refuse(errno.EPERM)))
    with pytest.raises(StorageError) as caught:
        store.rename(str(tmp_path / "absent"), str(tmp_path / "a"))

    assert caught.value.errno == errno.ENOENT
    assert "store.weaker" not in caplog.text
