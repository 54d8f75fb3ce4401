"""The process: one for each user, started by whoever needs it, ended when nothing needs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import anyio
import pytest
from tests.keeper.conftest import Run, Start, run_the_program

from penstock.cli import main as penstock_command
from penstock.errors import KeeperLostError, StorageError
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.keeper.messages import check_folder, default_socket
from penstock.keeper.process import IS_RUNNING, arguments, main, share_of_memory
from penstock.keeper.starting import ensure_keeper
from penstock.kernel.memory.memory_limit import MemoryReading

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture
def run() -> Run:
    """The program itself: others fork."""
    return run_the_program


@pytest.fixture
def socket(short_folder: Path) -> Iterator[str]:
    """Where a keeper may be started; it is stopped in the end."""
    path = str(Path(tempfile.mkdtemp(dir=short_folder)) / "penstock" / "keeper")
    yield path
    with suppress(KeeperLostError):
        KeeperStore(path).stop(force=True)


async def test_one_is_started_if_there_is_none_and_all_get_the_same(socket: str) -> None:
    found: list[int] = []

    async def ensure() -> None:
        found.append((await ensure_keeper(socket, limit_bytes=2**26, within_s=60)).pid)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ensure)

    assert len(found) == 3
    assert len({*found}) == 1
    assert found[0] != os.getpid()


async def test_it_has_its_own_session_and_none_of_our_descriptors(socket: str) -> None:
    status = await ensure_keeper(socket, within_s=60)
    assert os.getsid(status.pid) not in {os.getsid(0), 0}
    streams = {os.readlink(f"/proc/{status.pid}/fd/{number}") for number in (0, 1, 2)}
    assert streams == {"/dev/null", f"{socket}.log"}
    ours, theirs = _open_files("self"), _open_files(str(status.pid))
    assert {name for name in ours & theirs if not name.startswith(("/dev/", "anon_inode:"))} == set()


async def test_one_that_cannot_be_started_is_an_error_that_says_why(short_folder: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=short_folder))
    folder.chmod(0o755)
    with pytest.raises(KeeperLostError, match="open to other users"):
        await ensure_keeper(str(folder / "keeper"), within_s=60)


async def test_one_that_does_not_answer_is_not_waited_for_longer_than_asked(start: Start) -> None:
    keeper = start()
    keeper.send(signal.SIGSTOP)
    with pytest.raises(KeeperLostError, match="in time"):
        await ensure_keeper(keeper.socket, within_s=0.1)


def test_of_two_keepers_at_a_place_the_second_ends(start: Start) -> None:
    keeper = start()
    given = arguments(keeper.socket, None, 1.0, detached=False)
    assert main(given) == IS_RUNNING
    assert keeper.store().status().pid == keeper.process.pid


def test_one_that_was_killed_is_in_nobodys_way(start: Start) -> None:
    keeper = start()
    keeper.kill()
    assert os.path.exists(keeper.socket), "it could not tidy up"
    assert start(socket=keeper.socket).store().status().steps == []


def test_it_ends_when_it_is_idle_and_holds_nothing(start: Start) -> None:
    keeper = start(idle_s=0.05)
    assert keeper.process.wait(60) == 0
    assert not os.path.exists(keeper.socket)


def test_it_stays_while_it_holds_what_no_other_tier_has(start: Start) -> None:
    keeper = start(idle_s=0.2)
    store = keeper.store()
    store.make_directory("/run/1")
    store.write_file("/run/1/file", b"content")
    store.publish(store.begin_build("/run/2", "/run/1"))
    store.close()
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.process.wait(1.0)

    store.note_elsewhere("/run/2")
    store.close()
    keeper.process.wait(60)


def test_doctor_says_which_keepers_there_are_and_which_is_used(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    used, other = start(), start()
    monkeypatch.setenv("PENSTOCK_STORE__KEEPER__SOCKET", used.socket)
    store = other.store()
    store.make_directory("/run/1")
    store.publish(store.begin_build("/run/2", "/run/1"))

    assert penstock_command(["doctor", str(tmp_path)]) == 0

    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    rows = {line[1]: line for line in lines if line[0].endswith("keeper")}
    assert rows[used.socket][:3] == ["keeper", used.socket, "ok"]
    what, _, verdict, remark = rows[other.socket]
    assert (what, verdict) == ("other keeper", "slower")
    assert remark.startswith("holds 1 step that")
    assert "XDG_RUNTIME_DIR" in remark


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_frees_its_memory(start: Start, number: signal.Signals) -> None:
    keeper = start()
    keeper.store().write_file("/document", b"content")
    keeper.send(number)
    assert keeper.process.wait(60) == 0
    assert not os.path.exists(keeper.socket)


def test_it_is_stopped_only_if_nothing_is_lost_or_that_is_wanted(start: Start) -> None:
    keeper = start()
    store = keeper.store()
    store.make_directory("/run/tmp")
    store.write_file("/run/tmp/file", b"content")
    store.publish(store.begin_build("/run/1", "/run/tmp"))
    with pytest.raises(StorageError, match="no other tier has: run/1"):
        store.stop()

    assert store.kind("/run/1") == "directory"
    store.stop(force=True)
    assert keeper.process.wait(60) == 0


def test_what_a_killed_client_was_building_goes_and_what_it_published_stays(start: Start) -> None:
    keeper = start()
    program = f"""
import os, signal
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
store = KeeperStore({keeper.socket!r})
for name, publishes in (("1", True), ("2", False)):
    token = store.begin_build(f"/run/{{name}}", f"/run/{{name}}.tmp")
    hold = store.make_held(token.place)
    file = store.create_data_file(f"{{token.place}}/data")
    file.write_at(0, [memoryview(b"x" * 2**20)])
    file.sync()
    if publishes:
        store.publish(token)
reading = store.hold_reading("/run/1")
os.kill(os.getpid(), signal.SIGKILL)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], env=environ, check=False, timeout=60)
    with closing(keeper.store()) as store:
        store.hold("/run/1").release()  # the keeper looks whether who holds it is still there
        deadline = time.monotonic() + 60
        while list(store.list_directory("/run")) != ["1"]:
            assert time.monotonic() < deadline

        assert store.read_file("/run/1/data") == b"x" * 2**20
        assert [step.path for step in store.status().steps] == ["run/1"]


def test_a_folder_of_another_user_is_no_place_for_a_socket(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make one")

    folder = tmp_path / "penstock"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        check_folder(str(folder))


def test_a_link_is_no_place_for_a_socket(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("folder")
    check_folder(str(tmp_path / "folder"))
    with pytest.raises(PermissionError, match="no directory"):
        check_folder(str(tmp_path / "link"))


def test_a_user_has_one_place(tmp_path: Path) -> None:
    assert default_socket({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"{tmp_path}/penstock/keeper"
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": f"{tmp_path}/absent"}):
        assert default_socket(environ) == f"/tmp/penstock-{os.geteuid()}/keeper"


def test_by_itself_it_takes_half_of_what_is_free() -> None:
    assert share_of_memory(MemoryReading(limit=100, free=40)) == 20


def _open_files(process: str) -> set[str]:
    found = set[str]()
    for number in os.listdir(f"/proc/{process}/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{process}/fd/{number}"))

    return found
