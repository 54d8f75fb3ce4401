"""Second names of files, and files as memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.handlers.stores.large_files import SHARED_MEMORY, content

from penstock.errors import StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores.data_file import PAGE, address_of
from penstock.handlers.stores.regular_files import SyncedFiles


def test_a_file_gets_a_second_name(tmp_path: Path) -> None:
    store, first, second = LocalStore(), tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"content")
    store.share(str(first), str(second))
    first.unlink()

    assert second.read_bytes() == b"content"


def test_the_file_behind_a_symbolic_link_gets_the_second_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "sub").mkdir()
    LocalStore().share(str(tmp_path / "link"), str(tmp_path / "sub" / "second"))

    assert not (tmp_path / "sub" / "second").is_symlink()
    assert (tmp_path / "sub" / "second").samefile(tmp_path / "file")


@pytest.mark.parametrize(
    ("source", "destination", "number"),
    [
        ("file", "taken", errno.EEXIST),
        ("absent", "new", errno.ENOENT),
        ("sub", "new", errno.EPERM),
        pytest.param(
            "file",
            SHARED_MEMORY / "penstock-never-made",
            errno.EXDEV,
            marks=pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="one file system only"),
        ),
    ],
)
def test_a_second_name_that_cannot_be_given(
    tmp_path: Path, source: str, destination: str | Path, number: int
) -> None:
    for name in ("file", "taken"):
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()

    with pytest.raises(StorageError) as caught:
        LocalStore().share(str(tmp_path / source), str(tmp_path / destination))
    assert (caught.value.operation, caught.value.errno) == ("share", number)


@pytest.fixture
def mapped(tmp_path: Path) -> Callable[[bytes], memoryview]:
    def make(data: bytes) -> memoryview:
        path = tmp_path / "data"
        path.write_bytes(data)
        view = LocalStore().map_file(str(path))
        path.unlink()
        return view

    return make


def test_a_mapped_file_is_there_as_long_as_it_is_looked_at(mapped: Callable[[bytes], memoryview]) -> None:
    view = mapped(content(3 * PAGE + 5))
    part = np.frombuffer(view, np.uint8)[PAGE:]
    assert (view.readonly, view.format, view.nbytes) == (True, "B", 3 * PAGE + 5)
    assert address_of(view) % PAGE == 0
    assert not part.flags.writeable
    del view

    assert part.tobytes() == content(3 * PAGE + 5)[PAGE:]


def test_an_empty_file_is_mapped(mapped: Callable[[bytes], memoryview]) -> None:
    assert mapped(b"").tobytes() == b""


@pytest.mark.parametrize(("name", "number"), [("absent", errno.ENOENT), ("", errno.EISDIR)])
def test_what_cannot_be_mapped(tmp_path: Path, name: str, number: int) -> None:
    with pytest.raises(StorageError) as caught:
        LocalStore().map_file(str(tmp_path / name))

    assert caught.value.errno == number


def test_a_file_is_known_as_synced_until_it_is_written(tmp_path: Path) -> None:
    known, path = SyncedFiles(), tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        file.write(b"content")
        assert not known.knows(file.fileno())
        known.note(file.fileno())
        (tmp_path / "second").hardlink_to(path)
        assert known.knows(file.fileno())

        os.utime(path, ns=(0, 0))
        assert not known.knows(file.fileno()), "somebody else wrote it"


def test_files_are_synced_whoever_wrote_them(tmp_path: Path) -> None:
    store = LocalStore()
    store.write_file(str(tmp_path / "ours"), b"content")
    (tmp_path / "other").write_bytes(b"content")
    for name in ("ours", "other"):
        store.sync_file(str(tmp_path / name))

    with pytest.raises(StorageError) as caught:
        store.sync_file(str(tmp_path / "absent"))
    assert caught.value.errno == errno.ENOENT
