"""fsspec file systems do what every store does: that in memory, and the local one."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from penstock import Checkpointer
from penstock.errors import AccessDeniedError, SpecError, StorageError, UnreachableError
from penstock.handlers import fsspec_store
from penstock.handlers.stores.buckets.bucket_builds import MARK
from penstock.handlers.stores.buckets.fsspec_store import FsspecObjects
from penstock.handlers.stores.buckets.objects import Listing
from penstock.kernel import Store
from penstock.steps import CheckpointManager, KeepLast
from penstock.testing import LongFileConformance, SharingConformance, StoreConformance

fsspec = pytest.importorskip("fsspec", reason="needs fsspec")


def in_memory(root: str = "bucket/root") -> FsspecObjects:
    return FsspecObjects(new_memory(), root)


def new_memory() -> Any:
    """Return a file system of its own: fsspec's class keeps all files in one place for the process."""
    kind = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
    fs: Any = type("OwnMemory", (kind,), {"store": {}, "pseudo_dirs": [""], "cachable": False})()
    return fs


class TestInMemory(StoreConformance, SharingConformance, LongFileConformance):
    own_names = frozenset({MARK})

    @pytest.fixture(autouse=True)
    def _memory(self) -> None:
        self.fs = new_memory()

    def make_store(self) -> Store:
        return fsspec_store(self.fs, "bucket/root", file_bytes=2**20)

    def root(self, tmp_path: Path) -> str:
        return ""  # of a prefix, nobody knows that it is empty


class TestOnDisk(StoreConformance, SharingConformance, LongFileConformance):
    own_names = frozenset({MARK})

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = tmp_path / "store"

    def make_store(self) -> Store:
        return fsspec_store(
            fsspec.filesystem("file", skip_instance_cache=True), str(self.place), file_bytes=2**20
        )

    def root(self, tmp_path: Path) -> str:
        return ""  # of a prefix, nobody knows that it is empty


def test_a_store_of_fsspec_says_what_it_can_do() -> None:
    store = fsspec_store(new_memory(), "bucket")
    assert (store.directories, store.system_files, store.objects) == (None, None, store)
    with pytest.raises(SpecError, match="no fsspec file system"):
        fsspec_store("memory")


@pytest.mark.anyio
async def test_steps_are_saved_verified_and_deleted() -> None:
    fs = new_memory()
    tree = {"w": np.arange(1000.0), "name": "run"}
    async with CheckpointManager("/run", keep=KeepLast(1), store=fsspec_store(fs, "bucket")) as manager:
        for step in (1, 2):
            save = await manager.save(step, tree)
            assert save is not None
            report = await save
            assert report.single_writer

        await manager.wait()
        assert list(manager.all_steps()) == [2]
        np.testing.assert_array_equal((await manager.restore())["w"], tree["w"])

    async with Checkpointer(store=fsspec_store(fs, "bucket")) as checkpointer:
        assert (await checkpointer.verify("/run/2")).intact

    assert not [name for name in fs.find("bucket") if "penstock-saving" in name]


def test_a_directory_that_is_empty_is_removed_and_the_outermost_stays(tmp_path: Path) -> None:
    objects = FsspecObjects(fsspec.filesystem("file"), str(tmp_path / "root"))
    objects.put("a/b/c", b"data")
    objects.put("a/other", b"data")
    objects.delete(["a/b/c", "a/b/absent"])
    assert sorted(path.name for path in (tmp_path / "root").rglob("*")) == ["a", "other"]

    fs = new_memory()
    fs.mkdir("/bucket")
    FsspecObjects(fs, "").delete(["bucket/absent"])
    assert fs.exists("/bucket")


def test_a_file_is_created_once_and_swapped_if_it_has_not_changed() -> None:
    objects = in_memory()
    assert objects.create("key", b"one") == "created"
    assert objects.create("key", b"one") == "same"
    assert objects.create("key", b"other") == "other"
    found = objects.read("key")
    assert found is not None
    assert found.tag is not None
    assert objects.swap("key", b"two", "another tag") is None
    tag = objects.swap("key", b"two", found.tag)
    assert tag not in {None, found.tag}
    assert objects.swap("key", b"three", found.tag) is None, "it has changed"
    assert bytes(objects.read_range("key", 1, 10)) == b"wo"
    assert list(objects.walk("")) == ["key"]
    assert objects.list("key") == Listing([], []), "nothing is below it"
    assert objects.head("absent") is None
    assert not objects.has_below("absent")


@pytest.mark.parametrize(
    ("raised", "expected", "number"),
    [
        (PermissionError("no"), AccessDeniedError, errno.EACCES),
        (TimeoutError("late"), UnreachableError, None),
        (OSError(errno.ENOSPC, "full"), StorageError, errno.ENOSPC),
        (RuntimeError("of the client"), StorageError, errno.EIO),
    ],
)
def test_what_a_file_system_raises_is_translated(
    raised: Exception, expected: type[StorageError], number: int | None
) -> None:
    fs = new_memory()

    def fail(*args: object, **keywords: object) -> NoReturn:
        raise raised

    fs.pipe_file = fail
    with pytest.raises(expected, match="/run/key") as caught:
        FsspecObjects(fs, "bucket").put("run/key", b"data")

    assert number is None or caught.value.errno == number
