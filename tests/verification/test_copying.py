"""Copies of checkpoints between stores: the same bytes, compared on the way, all of it or nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import pytest
from tests.open_files import at_most

import penstock
from penstock.errors import ChecksumError, CorruptCheckpointError, DestinationExistsError, StorageError
from penstock.handlers import LocalStore
from penstock.items import Json
from penstock.kernel import MemoryRegulator, Store, StoreWrapper
from penstock.kernel.concurrency.threads import Threads
from penstock.testing import FaultyStore, MemoryStore
from penstock.verification.copying import (
    COPY_WORKERS,
    CheckpointCopier,
    is_same_checkpoint,
    lengths_below,
)

pytestmark = pytest.mark.anyio

MIB = 2**20


def tree(fill: float = 1.0) -> dict[str, Any]:
    small = {f"s{number}": np.full(7, number, np.int16) for number in range(50)}
    return {
        "w": np.arange(3 * MIB, dtype=np.float32) * np.float32(fill),
        "empty": np.zeros(0),
        "n": 3,
        **small,
    }


FORMATS: dict[str, dict[str, Any]] = {
    "ocdbt": {},
    "chunk files": {"save_format": penstock.SaveFormat(ocdbt=False)},
    "zstd": {"save_format": penstock.SaveFormat(codec="zstd:1")},
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def target() -> Iterator[FaultyStore]:
    store = FaultyStore(LocalStore())
    yield store
    assert store.open_files == 0


def copier(source: Store, target: Store, limit: int = 64 * MIB) -> CheckpointCopier:
    return CheckpointCopier(source, target, Threads(COPY_WORKERS), MemoryRegulator(limit))


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("limit", [64 * MIB, MIB])
async def test_a_copy_has_the_same_files(
    options: dict[str, Any], limit: int, tmp_path: Path, target: FaultyStore
) -> None:
    source, copy = tmp_path / "a", tmp_path / "b" / "c"
    async with penstock.Checkpointer(**options) as checkpointer:
        items = penstock.Composite(params=tree(), more=Json({"a": [1]}))
        await (await checkpointer.save(source, items))

    copying, shown = copier(LocalStore(), target, limit), list[int]()
    nbytes = await copying.copy(str(source), str(copy), on_progress=shown.append)

    assert files(copy) == files(source)
    assert nbytes == sum(map(len, files(source).values())) == shown[-1]
    assert shown == sorted(shown)
    assert copying.memory.statistics().leased == 0
    assert copying.memory.peak <= limit // 4
    assert (await penstock.verify(copy)).intact
    assert is_same_checkpoint(LocalStore(), str(source), LocalStore(), str(copy))


async def test_a_copy_takes_no_more_memory_than_its_files_have(tmp_path: Path, target: FaultyStore) -> None:
    """However large the budget is. A job that saves often copies little, and often."""
    source, copy = tmp_path / "a", tmp_path / "b"
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(source, {"w": np.zeros(50_000, np.float32)}))

    copying = copier(LocalStore(), target, 1024 * MIB)
    await copying.copy(str(source), str(copy))

    assert 0 < copying.memory.peak <= sum(map(len, files(source).values()))
    assert files(copy) == files(source)


async def test_a_copy_has_more_files_than_a_process_may_open(tmp_path: Path, target: FaultyStore) -> None:
    source, copy = tmp_path / "a", tmp_path / "b"
    many = {f"x{number:03}": np.full(3, number) for number in range(150)}
    async with penstock.Checkpointer(save_format=penstock.SaveFormat(ocdbt=False)) as checkpointer:
        await (await checkpointer.save(source, many))

    with at_most(100):
        await copier(LocalStore(), target).copy(str(source), str(copy))

    assert files(copy) == files(source)


async def test_a_copy_in_a_store_without_directories_can_be_restored(tmp_path: Path) -> None:
    source, bucket = tmp_path / "a", MemoryStore()
    await penstock.save(source, tree())
    await copier(LocalStore(), bucket).copy(str(source), "/run/1")
    async with penstock.Checkpointer(store=bucket) as checkpointer:
        found = await checkpointer.restore("/run/1")

    np.testing.assert_array_equal(found["w"], tree()["w"])
    assert is_same_checkpoint(LocalStore(), str(source), bucket, "/run/1")


async def test_checkpoints_of_different_content_are_not_the_same(tmp_path: Path) -> None:
    for name, fill in {"a": 1.0, "b": 2.0}.items():
        await penstock.save(tmp_path / name, tree(fill))

    assert not is_same_checkpoint(LocalStore(), str(tmp_path / "a"), LocalStore(), str(tmp_path / "b"))


@pytest.mark.parametrize("offset", [0, 5 * MIB, -1])
async def test_damage_is_not_copied(offset: int, tmp_path: Path, target: FaultyStore) -> None:
    source, copy = tmp_path / "a", tmp_path / "b"
    await penstock.save(source, tree())
    file = max((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumError):
        await copier(LocalStore(), target).copy(str(source), str(copy))

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


async def test_a_damaged_document_is_not_copied(tmp_path: Path, target: FaultyStore) -> None:
    source = tmp_path / "a"
    await penstock.save(source, tree())
    (source / "_METADATA").write_bytes((source / "_METADATA").read_bytes().replace(b"s1", b"s9", 1))
    with pytest.raises(CorruptCheckpointError):
        await copier(LocalStore(), target).copy(str(source), str(tmp_path / "b"))

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


async def test_what_is_there_is_replaced_only_if_that_is_asked_for(
    tmp_path: Path, target: FaultyStore
) -> None:
    for name, fill in {"a": 1.0, "b": 2.0}.items():
        await penstock.save(tmp_path / name, tree(fill))

    source, copy = str(tmp_path / "a"), str(tmp_path / "b")
    with pytest.raises(DestinationExistsError):
        await copier(LocalStore(), target).copy(source, copy)

    await copier(LocalStore(), target).copy(source, copy, overwrite=True)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


async def test_whatever_fails_nothing_is_at_the_destination_and_the_next_copy_succeeds(
    tmp_path: Path,
) -> None:
    source, copy = tmp_path / "a", tmp_path / "b"
    await penstock.save(source, {"w": np.arange(MIB // 4, dtype=np.float32), "n": 1})
    counted = FaultyStore(LocalStore())
    await copier(LocalStore(), counted).copy(str(source), str(tmp_path / "c"))
    n_operations = len(counted.operations)
    assert n_operations > 20
    for number in range(1, n_operations + 1):
        target = FaultyStore(LocalStore())
        target.fail_at(number, StorageError("write", str(copy), "injected", errno.EIO))
        try:
            await copier(LocalStore(), target).copy(str(source), str(copy))
        except StorageError:
            if not copy.exists():  # else it was published, and what came after failed
                await copier(LocalStore(), LocalStore()).copy(str(source), str(copy))

        assert files(copy) == files(source)
        assert target.open_files == 0
        await penstock.delete(copy)


async def test_a_cancelled_copy_leaves_nothing(tmp_path: Path, target: FaultyStore) -> None:
    source, copy = tmp_path / "a", tmp_path / "b"
    await penstock.save(source, tree())
    hang = target.hang_on("data.write_at", 3)
    copying = copier(LocalStore(), target)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(copying.copy, str(source), str(copy))
        await hang.wait_reached()
        tasks.cancel_scope.cancel()
        hang.release()

    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert copying.memory.statistics().leased == 0


class VanishingStore(StoreWrapper):
    """A bucket whose folders are gone just after they were listed."""

    def file_sizes(self, paths: Iterable[str]) -> Sequence[int | None]:
        return [-1 for _ in paths]

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        return None


def test_a_folder_that_is_gone_since_it_was_listed_is_no_device(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    with pytest.raises(CorruptCheckpointError, match="is listed and not there"):
        lengths_below(VanishingStore(LocalStore()), str(tmp_path))
