from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.handlers import LocalStore


def test_creating_a_file_returns_whether_it_was_created(tmp_path: Path) -> None:
    path = str(tmp_path / "file")

    assert LocalStore().write_file(path, b"content", create=True) is True
    assert LocalStore().write_file(path, b"content", create=True) is False
    with pytest.raises(StorageError) as caught:
        LocalStore().write_file(path, b"other", create=True)

    assert caught.value.errno == errno.EEXIST
    assert os.listdir(tmp_path) == ["file"]
    assert Path(path).read_bytes() == b"content"


def test_a_file_that_is_there_is_never_read_in_part(tmp_path: Path) -> None:
    store, path, data = LocalStore(), str(tmp_path / "file"), b"x" * 5_000_000

    def create(_: int) -> bool:
        return store.write_file(path, data, create=True)  # who reads a part of it raises EEXIST

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(create, range(4))) == [False, False, False, True]


def test_what_lies_there_is_not_replaced_whatever_it_is(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "link"):
        with pytest.raises(StorageError) as caught:
            LocalStore().write_file(str(tmp_path / name), b"", create=True)
        assert caught.value.errno == errno.EEXIST

    assert sorted(os.listdir(tmp_path)) == ["folder", "link"]


def test_what_cannot_be_created_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        LocalStore().write_file(str(tmp_path / "absent" / "file"), b"", create=True)

    assert caught.value.errno == errno.ENOENT
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_replaced_in_one_step_is_never_written_in_place(tmp_path: Path) -> None:
    file = tmp_path / "document"
    file.write_bytes(b"what was there")
    with file.open("rb") as opened:
        LocalStore().replace_file(str(file), b"new")
        assert opened.read() == b"what was there", "a reader has all of it"

    assert file.read_bytes() == b"new"


def test_a_file_that_cannot_be_replaced_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "directory"
    place.mkdir()
    with pytest.raises(StorageError, match="replace"):
        LocalStore().replace_file(str(place), b"new")

    assert list(tmp_path.iterdir()) == [place]
