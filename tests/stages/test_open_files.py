from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
from tests.open_files import at_most, open_below

import penstock
from penstock import SaveFormat
from penstock.errors import StorageError
from penstock.handlers import LocalStore
from penstock.kernel import ReadableFile, Threads
from penstock.stages.files import opened
from penstock.stages.read import OpenFiles
from penstock.testing import FaultyStore


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    for at in range(6):
        (tmp_path / str(at)).write_bytes(bytes([at]))

    return [str(tmp_path / str(at)) for at in range(6)]


def first_byte(files: OpenFiles, path: str) -> int:
    data = bytearray(1)
    with files.use(path) as file:
        file.read_at(0, [memoryview(data)])

    return data[0]


def test_only_the_last_few_files_stay_open(paths: list[str], tmp_path: Path) -> None:
    files = OpenFiles(LocalStore(), 2)

    assert [first_byte(files, path) for path in paths] == list(range(6))
    assert len(open_below(tmp_path)) == 2
    assert first_byte(files, paths[5]) == 5
    assert len(files.opened) == 6
    assert first_byte(files, paths[0]) == 0
    assert len(files.opened) == 7

    for file in files.opened:
        file.close()

    assert open_below(tmp_path) == []


def test_a_file_that_is_used_is_not_closed(paths: list[str]) -> None:
    files = OpenFiles(LocalStore(), 2)
    data = bytearray(1)
    with files.use(paths[3]) as file:
        assert [first_byte(files, path) for path in paths] == list(range(6))
        file.read_at(0, [memoryview(data)])

    assert data[0] == 3
    for file in files.opened:
        file.close()


@pytest.mark.anyio
async def test_a_file_that_is_slow_to_open_is_opened_once_and_delays_no_other(
    paths: list[str],
) -> None:
    store, threads, found = FaultyStore(LocalStore()), Threads(), list[int]()
    files = OpenFiles(store, 4)
    hang = store.hang_on("open_data_file")

    async def read(path: str) -> None:
        found.append(await threads.run(first_byte, files, path))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, paths[3])
            await hang.wait_reached()
            tasks.start_soon(read, paths[3])
            await read(paths[5])
            assert found == [5]
            hang.release()

    assert found == [5, 3, 3]
    assert len(files.opened) == 2
    for file in files.opened:
        file.close()


def test_a_file_that_is_not_there_costs_nothing(paths: list[str], tmp_path: Path) -> None:
    files = OpenFiles(LocalStore(), 2)
    with pytest.raises(StorageError), files.use(str(tmp_path / "absent")):
        pass

    assert open_below(tmp_path) == []
    assert files.opened == []


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
async def test_a_checkpoint_has_more_files_than_a_process_may_open(*, mmap: bool, tmp_path: Path) -> None:
    tree = {f"x{at:03}": np.full(3, at) for at in range(150)}
    async with penstock.Checkpointer(save_format=SaveFormat(ocdbt=False)) as checkpointer:
        with at_most(100):
            await (await checkpointer.save(tmp_path / "c", tree))
            found = await checkpointer.restore(tmp_path / "c", mmap=mmap)
            assert (await checkpointer.verify(tmp_path / "c")).n_leaves == 150

    assert [int(value[0]) for value in found.values()] == list(range(150))


async def test_a_checkpoint_is_written_in_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    tree = {f"x{at:03}": np.full(300, at) for at in range(80)}
    with at_most(50):
        await penstock.export_safetensors(tree, tmp_path / "c", max_shard_bytes=3000)

    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 80
    found = await penstock.restore(tmp_path / "c")
    assert [int(value[0]) for value in found.values()] == list(range(80))


@pytest.mark.parametrize("when", ["while it is opened", "in the block"])
async def test_a_file_is_closed_when_it_is_cancelled(paths: list[str], tmp_path: Path, when: str) -> None:
    def open_file() -> ReadableFile:
        file = LocalStore().open_data_file(paths[0])
        if when == "while it is opened":
            anyio.from_thread.run_sync(scope.cancel)

        return file

    with anyio.CancelScope() as scope:
        async with opened(Threads(1), open_file) as file:
            file.read_at(0, [memoryview(bytearray(1))])
            scope.cancel()
            await anyio.sleep_forever()

    assert scope.cancelled_caught
    assert open_below(tmp_path) == []
