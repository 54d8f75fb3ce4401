from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import create_task_group, to_thread

from penstock.errors import StorageError
from penstock.handlers import LocalStore
from penstock.kernel import Store, Transfers
from penstock.testing import Crash, CrashStore, FaultyStore, Operation

pytestmark = pytest.mark.anyio


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(LocalStore())


def view(data: bytes) -> memoryview:
    return memoryview(data)


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def exercise(store: FaultyStore, root: str) -> None:
    """Every operation once."""
    a, b, data = f"{root}/a", f"{root}/b", f"{root}/a/data"
    store.check_writable(a)
    store.make_directory(a)
    store.make_directory(b)
    with closing(store.create_data_file(data)) as file:
        file.allocate(100)
        file.write_at(0, [view(b"01234567")])
        file.sync()
        assert file.transfers == Transfers(0, 8)
    store.write_file(f"{a}/document", b"text")
    store.sync_directory(a)
    store.sync_tree(a)
    store.hold(a).release()
    store.hold_reading(a).release()
    token = store.begin_build(b, a)
    store.exchange(token)
    store.discard(token)
    token = store.begin_build(f"{root}/final", b)
    store.publish(token)
    store.rename(f"{root}/final", f"{root}/c")
    with closing(store.open_data_file(f"{root}/c/data")) as readable:
        readable.read_at(0, [memoryview(bytearray(8))])
        assert readable.transfers == Transfers(0, 8)
    store.share(f"{root}/c/data", f"{root}/c/second")
    assert store.map_file(f"{root}/c/second").tobytes() == b"01234567"
    assert store.kind(f"{root}/c") == "directory"
    assert store.size(f"{root}/c/data") == 8
    assert store.list_directory(f"{root}/c") == ["data", "document", "second"]
    assert store.read_file(f"{root}/c/document") == b"text"
    assert store.list_folders(root) == ["c"]
    assert store.read_files([f"{root}/c/document"]) == [b"text"]
    assert store.file_sizes([f"{root}/c/document"]) == [4]
    store.remove_tree(f"{root}/a")


EXERCISE = (
    *("check_writable", "make_directory", "make_directory", "create_data_file", "data.allocate"),
    *("data.write_at", "data.sync", "data.close", "write_file", "sync_directory", "sync_tree", "hold"),
    *("hold_reading", "begin_build", "exchange", "discard", "begin_build", "publish", "rename"),
    *("open_data_file", "file.read_at", "file.close", "share", "map_file", "kind", "size"),
    *("list_directory", "read_file", "list_folders", "read_files", "file_sizes", "remove_tree"),
)


def test_every_operation_is_passed_on_and_logged(store: FaultyStore, tmp_path: Path) -> None:
    exercise(store, str(tmp_path))

    assert tuple(operation.name for operation in store.operations) == EXERCISE
    assert store.operations[5] == Operation("data.write_at", str(tmp_path / "a" / "data"))
    assert store.open_files == 0
    assert tree(tmp_path) == {
        "c": None,
        "c/data": b"01234567",
        "c/document": b"text",
        "c/second": b"01234567",
    }


@pytest.mark.parametrize("k", range(1, len(EXERCISE) + 1))
def test_each_operation_can_be_made_to_fail(store: FaultyStore, tmp_path: Path, k: int) -> None:
    error = StorageError("any", "path", "no", errno.ENOSPC)
    store.fail_at(k, error)
    with pytest.raises(StorageError) as caught:
        exercise(store, str(tmp_path))

    assert caught.value is error
    assert store.operations[k - 1].name == EXERCISE[k - 1]
    assert store.open_files == 0


def test_a_fault_by_name_counts_that_name_only_and_happens_once(store: FaultyStore, tmp_path: Path) -> None:
    store.fail_on("write_file", 2)
    path = str(tmp_path / "document")
    store.write_file(path, b"first")
    with pytest.raises(StorageError, match="injected failure") as caught:
        store.write_file(path, b"second")
    assert caught.value.errno == errno.EIO
    assert store.read_file(path) == b"first"

    store.write_file(path, b"third")
    assert store.read_file(path) == b"third"


def test_a_close_that_fails_has_closed(store: FaultyStore, tmp_path: Path) -> None:
    store.fail_on("data.close")
    file = store.create_data_file(str(tmp_path / "data"))
    assert store.open_files == 1

    with pytest.raises(StorageError, match="injected failure"):
        file.close()
    assert store.open_files == 0
    file.close()


def test_a_file_that_could_not_be_opened_is_not_open(store: FaultyStore, tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        store.open_data_file(str(tmp_path / "absent"))

    assert store.open_files == 0


def test_a_torn_write_leaves_half_of_its_bytes(store: FaultyStore, tmp_path: Path) -> None:
    store.tear_at(2)
    store.tear_on("write_file", 1, StorageError("write", "x", "no space", errno.ENOSPC))
    file = store.create_data_file(str(tmp_path / "data"))
    with pytest.raises(StorageError, match="injected failure"):
        file.write_at(0, [view(b"0123"), view(b"4567")])
    file.close()
    with pytest.raises(StorageError, match="no space"):
        store.write_file(str(tmp_path / "document"), b"text")

    assert tree(tmp_path) == {"data": b"0123", "document": b"te"}


def test_tearing_what_writes_nothing_fails_it(store: FaultyStore, tmp_path: Path) -> None:
    store.tear_at(1)
    with pytest.raises(StorageError, match="injected failure"):
        store.make_directory(str(tmp_path / "a"))

    assert tree(tmp_path) == {}


async def test_a_hung_operation_waits_until_it_is_released(store: FaultyStore, tmp_path: Path) -> None:
    hang = store.hang_on("write_file")
    path = str(tmp_path / "document")
    write = partial(store.write_file, path, b"text")
    with anyio.fail_after(10):
        async with create_task_group() as tasks:
            tasks.start_soon(to_thread.run_sync, write)
            await hang.wait_reached()
            assert tree(tmp_path) == {}
            hang.release()

    assert tree(tmp_path) == {"document": b"text"}


async def test_a_hung_operation_can_fail_in_the_end(store: FaultyStore, tmp_path: Path) -> None:
    hang = store.hang_at(1, then=StorageError("write", "x", "gave up"))
    hang.release()
    with pytest.raises(StorageError, match="gave up"):
        store.write_file(str(tmp_path / "document"), b"text")


def save(store: Store, root: str, *, sync_data: bool = True, sync_last: bool = True) -> None:
    """A small commit: build under a temporary name, publish by a rename."""
    temporary = f"{root}/runs/tmp"
    store.make_directory(temporary)
    with closing(store.create_data_file(f"{temporary}/data")) as file:
        file.write_at(4, [view(b"4567")])
        file.write_at(0, [view(b"01"), view(b"23")])
        if sync_data:
            file.sync()
    store.write_file(f"{temporary}/document", b"text")
    store.sync_directory(temporary)
    store.publish(store.begin_build(f"{root}/runs/step", temporary))
    if sync_last:
        store.sync_directory(f"{root}/runs")


WHOLE = {"runs": None, "runs/step": None, "runs/step/data": b"01234567", "runs/step/document": b"text"}


@pytest.fixture
def crashing(tmp_path: Path) -> CrashStore:
    (tmp_path / "before").write_bytes(b"there all along")
    return CrashStore(LocalStore(), tmp_path)


def after_power_loss(store: CrashStore, root: Path) -> dict[str, bytes | None]:
    store.lose_power()
    found = tree(root)
    assert found.pop("before") == b"there all along"
    return found


def test_what_was_made_durable_survives(crashing: CrashStore, tmp_path: Path) -> None:
    save(crashing, str(tmp_path))

    assert after_power_loss(crashing, tmp_path) == WHOLE
    crashing.remove_tree(str(tmp_path / "runs"))
    assert tree(tmp_path).keys() == {"before"}
    assert after_power_loss(crashing, tmp_path) == WHOLE, "the removal was never synced"


@pytest.mark.parametrize("synced", [False, True])
def test_what_others_wrote_survives_once_the_tree_is_synced(
    crashing: CrashStore, tmp_path: Path, synced: bool
) -> None:
    crashing.make_directory(str(tmp_path / "runs"))
    (tmp_path / "runs" / "theirs").write_bytes(b"theirs")
    if synced:
        crashing.sync_tree(str(tmp_path / "runs"))

    found = after_power_loss(crashing, tmp_path)

    assert found == ({"runs": None, "runs/theirs": b"theirs"} if synced else {"runs": None})


def test_bytes_that_were_not_synced_are_lost(crashing: CrashStore, tmp_path: Path) -> None:
    save(crashing, str(tmp_path), sync_data=False)

    assert after_power_loss(crashing, tmp_path) == {**WHOLE, "runs/step/data": b""}


def test_a_publication_that_was_not_synced_is_undone(crashing: CrashStore, tmp_path: Path) -> None:
    save(crashing, str(tmp_path), sync_last=False)

    found = after_power_loss(crashing, tmp_path)
    assert found == {path.replace("step", "tmp"): data for path, data in WHOLE.items()}


def test_a_file_made_after_the_directory_was_synced_is_lost(crashing: CrashStore, tmp_path: Path) -> None:
    for name in ("a", "b"):
        crashing.write_file(str(tmp_path / name), b"text")
        if name == "a":
            crashing.sync_directory(str(tmp_path))

    assert after_power_loss(crashing, tmp_path) == {"a": b"text"}


@pytest.mark.parametrize("synced", [True, False])
def test_an_exchange_survives_once_the_directory_is_synced(
    crashing: CrashStore, tmp_path: Path, synced: bool
) -> None:
    for name in ("a", "b"):
        crashing.make_directory(str(tmp_path / name))
        crashing.write_file(str(tmp_path / name / name), b"")
        crashing.sync_directory(str(tmp_path / name))
    crashing.exchange(crashing.begin_build(str(tmp_path / "b"), str(tmp_path / "a")))
    if synced:
        crashing.sync_directory(str(tmp_path))

    inside_a = "b" if synced else "a"
    assert f"a/{inside_a}" in after_power_loss(crashing, tmp_path)


@pytest.mark.parametrize("synced", [True, False])
def test_a_second_name_survives_once_the_directory_is_synced(
    crashing: CrashStore, tmp_path: Path, synced: bool
) -> None:
    save(crashing, str(tmp_path))
    crashing.make_directory(str(tmp_path / "next"))
    crashing.share(f"{tmp_path}/runs/step/data", f"{tmp_path}/next/data")
    if synced:
        crashing.sync_directory(f"{tmp_path}/next")
    crashing.remove_tree(f"{tmp_path}/runs/step")
    crashing.sync_directory(f"{tmp_path}/runs")

    found = after_power_loss(crashing, tmp_path)
    assert found == {"runs": None, "next": None, **({"next/data": b"01234567"} if synced else {})}


def test_bytes_written_under_one_name_are_synced_under_the_other(
    crashing: CrashStore, tmp_path: Path
) -> None:
    with closing(crashing.create_data_file(f"{tmp_path}/a")) as file:
        file.allocate(100)
        file.write_at(0, [view(b"text")])
        crashing.share(f"{tmp_path}/a", f"{tmp_path}/b")
        crashing.sync_directory(str(tmp_path))
        file.sync()

    assert after_power_loss(crashing, tmp_path) == {"a": b"text", "b": b"text"}


def test_a_machine_that_stopped_does_nothing_more(crashing: CrashStore, tmp_path: Path) -> None:
    path = str(tmp_path / "document")
    crashing.stop_after(1)
    crashing.write_file(path, b"text")
    operations: list[Callable[[], object]] = [
        lambda: crashing.write_file(path, b"more"),
        lambda: crashing.remove_tree(path),
        lambda: crashing.read_file(path),
        lambda: crashing.kind(path),
    ]
    for operation in operations:
        with pytest.raises(Crash, match="the machine stopped after change 1"):
            operation()

    assert tree(tmp_path)["document"] == b"text"
    assert crashing.n_changes == 1
    assert after_power_loss(crashing, tmp_path) == {}
    assert crashing.kind(str(tmp_path)) == "directory"


def test_a_root_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("root").mkdir()
    Path("root/unsynced").write_bytes(b"lost")
    store = CrashStore(LocalStore(), "root", unsynced=["root/unsynced"])
    save(store, str(tmp_path / "root"))

    store.lose_power()
    assert tree(tmp_path / "root") == {**WHOLE, "unsynced": b""}


def test_a_commit_is_whole_or_absent_wherever_the_machine_stops(tmp_path: Path) -> None:
    for k in range(20):
        root = tmp_path / str(k)
        root.mkdir()
        store = CrashStore(LocalStore(), root)
        store.stop_after(k)
        try:
            save(store, str(root))
        except Crash:
            store.lose_power()
            assert not os.path.exists(root / "runs" / "step")
        else:
            store.lose_power()
            assert tree(root) == WHOLE
            assert k == 9
            return

    pytest.fail("the save never finished")
