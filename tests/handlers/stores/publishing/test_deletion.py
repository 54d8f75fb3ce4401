from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import anyio
import pytest

from penstock.errors import InUseError, StorageError, UnsupportedByStoreError
from penstock.handlers import LocalStore
from penstock.handlers.stores.publishing.deletion import delete_checkpoint, move_checkpoint, remove_abandoned
from penstock.kernel import Placement
from penstock.testing import FaultyStore, MemoryStore


def made(path: Path) -> str:
    path.mkdir()
    (path / "file").write_bytes(b"content")
    return str(path)


def test_a_checkpoint_is_hidden_and_then_removed(tmp_path: Path) -> None:
    store, path, hidden = FaultyStore(LocalStore()), made(tmp_path / "1"), str(tmp_path / "1.tmp")
    made(tmp_path / "1.tmp")  # the rest of an earlier deletion

    delete_checkpoint(store, path, hidden)

    names = [operation.name for operation in store.operations]
    old = ["kind", "sync_directory", "hold", "remove_tree"]
    assert names == [*old, "hold", "rename", "sync_directory", "remove_tree"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("at", ["sync_directory", "remove_tree"])
def test_a_deletion_that_fails_after_the_first_step_leaves_no_checkpoint(tmp_path: Path, at: str) -> None:
    store, path = FaultyStore(LocalStore()), made(tmp_path / "1")
    store.fail_on(at)
    left = delete_checkpoint(store, path, str(tmp_path / "1.tmp"))

    assert left is not None
    assert left.errno == errno.EIO
    assert os.listdir(tmp_path) == ["1.tmp"]
    LocalStore().hold(str(tmp_path / "1.tmp")).release()


@pytest.mark.parametrize("at", ["hold", "rename"])
def test_a_deletion_that_fails_before_leaves_the_checkpoint(tmp_path: Path, at: str) -> None:
    store, path = FaultyStore(LocalStore()), made(tmp_path / "1")
    store.fail_on(at)
    with pytest.raises(StorageError):
        delete_checkpoint(store, path, str(tmp_path / "1.tmp"))

    assert os.listdir(path) == ["file"]


def test_what_is_deleted_is_held_until_it_is_gone(tmp_path: Path) -> None:
    """Between any two operations, somebody saves there anew; that stays."""
    for at in range(1, 6):
        store, path, hidden = FaultyStore(LocalStore()), made(tmp_path / "1"), str(tmp_path / "1.tmp")
        hang = store.hang_at(at)
        deletion = threading.Thread(target=delete_checkpoint, args=(store, path, hidden))
        deletion.start()
        anyio.run(hang.wait_reached)
        is_new = not os.path.exists(path)
        if is_new:
            made(tmp_path / "1")
        if os.path.exists(hidden):
            with pytest.raises(InUseError):
                LocalStore().hold(hidden)

        hang.release()
        deletion.join(20)
        assert os.path.exists(path) is is_new
        assert is_new is (at > 3)
        if is_new:
            shutil.rmtree(path)


def test_of_a_checkpoint_that_is_a_link_the_link_is_deleted(tmp_path: Path) -> None:
    made(tmp_path / "elsewhere")
    (tmp_path / "1").symlink_to("elsewhere")
    delete_checkpoint(LocalStore(), str(tmp_path / "1"), str(tmp_path / "1.tmp"))

    assert os.listdir(tmp_path) == ["elsewhere"]
    assert os.listdir(tmp_path / "elsewhere") == ["file"]


def test_only_what_is_abandoned_is_removed_as_such(tmp_path: Path) -> None:
    store, path = LocalStore(), str(tmp_path / "1.tmp")
    remove_abandoned(store, path)
    held = store.make_held(path)
    with pytest.raises(InUseError):
        remove_abandoned(store, path)

    held.release()
    remove_abandoned(store, path)
    assert os.listdir(tmp_path) == []


def test_what_is_read_is_neither_deleted_nor_moved(tmp_path: Path) -> None:
    store, path = LocalStore(), made(tmp_path / "1")
    held = store.hold_reading(path)
    for do in (delete_checkpoint, move_checkpoint):
        with pytest.raises(StorageError) as caught:
            do(store, path, str(tmp_path / "2"))
        assert caught.value.errno == errno.EBUSY

    held.release()
    move_checkpoint(store, path, str(tmp_path / "trash" / "1"))
    assert (tmp_path / "trash" / "1" / "file").read_bytes() == b"content"
    assert os.listdir(tmp_path) == ["trash"]


def test_what_a_moved_checkpoint_replaces_is_never_there_in_part(tmp_path: Path) -> None:
    store, path = FaultyStore(LocalStore()), made(tmp_path / "1")
    made(tmp_path / "2")
    hang = store.hang_on("remove_tree")
    move = threading.Thread(target=move_checkpoint, args=(store, path, str(tmp_path / "2")))
    move.start()
    hang.wait_reached_blocking()
    assert not (tmp_path / "2").exists()  # a crash now leaves it under another name
    hang.release()
    move.join(20)
    assert os.listdir(tmp_path) == ["2"]


def test_without_renames_a_checkpoint_is_removed_in_place_and_not_moved() -> None:
    store = MemoryStore()
    store.make_directory("/run/1")
    store.write_file("/run/1/file", b"content")
    with pytest.raises(UnsupportedByStoreError, match="MemoryStore cannot move '/run/1': it lacks Dir"):
        move_checkpoint(store, "/run/1", "/run/2")
    assert store.read_file("/run/1/file") == b"content"

    delete_checkpoint(store, "/run/1", "/run/1.tmp")
    assert list(store.list_directory("/run")) == []


def test_a_chunk_begins_where_the_store_prefers(tmp_path: Path) -> None:
    local, default = LocalStore().placement, MemoryStore().placement
    assert default == Placement()
    assert local.page_bytes >= 4096
    assert [default.step(nbytes) for nbytes in (4095, 4096, 2**20 - 1, 2**20)] == [1, 64, 64, 4096]
