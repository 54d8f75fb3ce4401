from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.handlers.stores.local import LocalStore
from penstock.kernel.errors import StorageError, UnsupportedByStoreError
from penstock.kernel.protocols.store_capabilities import Placement
from penstock.kernel.storage.byte_placement import placement_of
from penstock.kernel.storage.deletion import delete_checkpoint, move_checkpoint
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
    assert names == ["hold", "remove_tree", "rename", "sync_directory", "remove_tree"]
    assert os.listdir(tmp_path) == []


def test_a_deletion_that_fails_after_the_first_step_leaves_no_checkpoint(tmp_path: Path) -> None:
    store, path = FaultyStore(LocalStore()), made(tmp_path / "1")
    store.fail_on("remove_tree", 2)
    with pytest.raises(StorageError):
        delete_checkpoint(store, path, str(tmp_path / "1.tmp"))

    assert os.listdir(tmp_path) == ["1.tmp"]


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


def test_without_renames_a_checkpoint_is_removed_in_place_and_not_moved() -> None:
    store = MemoryStore()
    store.make_directory("/run/1")
    store.write_file("/run/1/file", b"content")
    with pytest.raises(UnsupportedByStoreError, match="MemoryStore cannot move '/run/1': it lacks Renames"):
        move_checkpoint(store, "/run/1", "/run/2")
    assert store.read_file("/run/1/file") == b"content"

    delete_checkpoint(store, "/run/1", "/run/1.tmp")
    assert list(store.list_directory("/run")) == []


def test_a_chunk_begins_where_the_store_prefers(tmp_path: Path) -> None:
    local, default = placement_of(LocalStore()), placement_of(MemoryStore())
    assert default == Placement()
    assert local.page_bytes >= 4096
    assert [default.step(nbytes) for nbytes in (4095, 4096, 2**20 - 1, 2**20)] == [1, 64, 64, 4096]
