"""What lies in the place of a file and is none is not read: it could be waited for, or read, without end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.open_files import open_below

from penstock.errors import (
    CorruptCheckpointError,
    NotAFileError,
    PenstockError,
    StorageError,
    UnsupportedFormatError,
)
from penstock.handlers import LocalStore
from penstock.handlers.stores.regular_files import MOST_DOCUMENT_BYTES, data_bytes

READERS: dict[str, Callable[[str], object]] = {
    "read_file": LocalStore().read_file,
    "read_files": lambda path: LocalStore().read_files([path]),
    "open_data_file": LocalStore().open_data_file,
    "map_file": LocalStore().map_file,
    "size": LocalStore().size,
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("make", [pipe, device, listening], ids=lambda make: make.__name__)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_is_no_file_is_not_waited_for(
    make: Callable[[Path], None], read: Callable[[str], object], tmp_path: Path
) -> None:
    make(tmp_path / "x")

    with pytest.raises(NotAFileError, match=r"x: is a .*, not a file"):
        read(str(tmp_path / "x"))


def test_a_pipe_has_no_size_among_those_of_chunks(tmp_path: Path) -> None:
    pipe(tmp_path / "x")

    assert LocalStore().file_sizes([str(tmp_path / "x"), str(tmp_path / "y")]) == [-1, None]


def test_a_file_is_not_created_in_its_place(tmp_path: Path) -> None:
    pipe(tmp_path / "x")

    with pytest.raises(StorageError, match="File exists"):
        LocalStore().write_file(str(tmp_path / "x"), b"", create=True)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"], ids=["NUL", "surrogate"])
def test_a_name_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    path, store = f"{tmp_path}/{name}", LocalStore()

    assert store.kind(path) is None
    assert store.read_files([path]) == [None]
    assert store.file_sizes([path]) == [None]
    for read in (store.read_file, store.open_data_file, store.size, store.list_directory):
        with pytest.raises(StorageError, match="is no possible path"):
            read(path)


def test_a_document_that_is_a_hole_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.write(b"{}")
        file.truncate(2**29)

    with pytest.raises(CorruptCheckpointError, match="536870912 bytes, and most of them are a hole"):
        LocalStore().read_file(str(tmp_path / "x"))


def test_a_document_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(MOST_DOCUMENT_BYTES + 1)

    with pytest.raises(UnsupportedFormatError, match="documents of up to"):
        LocalStore().read_file(str(tmp_path / "x"))


@pytest.mark.parametrize("nbytes", [0, 1, 2**20, 5_000_000])
def test_a_file_is_read_whole(nbytes: int, tmp_path: Path) -> None:
    content = os.urandom(nbytes)
    (tmp_path / "x").write_bytes(content)

    assert LocalStore().read_file(str(tmp_path / "x")) == content


def test_a_file_without_a_length_is_read_to_its_end() -> None:
    assert LocalStore().read_file("/proc/self/status").startswith(b"Name:")


def test_bytes_outside_of_holes_are_counted(tmp_path: Path) -> None:
    path, block = tmp_path / "x", 2**16
    with path.open("wb") as file:
        for at in (2, 5):
            file.seek(at * block)
            file.write(b"x" * block)

        file.truncate(8 * block)

    number = os.open(path, os.O_RDONLY)
    try:
        assert data_bytes(number, 8 * block) == 2 * block
        assert data_bytes(number, 3 * block) == block
    finally:
        os.close(number)


def test_a_mapped_file_holds_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    views = [LocalStore().map_file(str(tmp_path / "x")) for _ in range(10)]

    assert open_below(tmp_path) == []
    assert {bytes(view) for view in views} == {b"content"}
    assert all(view.readonly for view in views)


def test_an_error_of_penstock_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=r"^open '.*/absent': No such file"):
        LocalStore().open_data_file(str(tmp_path / "absent"))
