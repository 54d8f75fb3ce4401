"""Directories that are made held: what a process leaves that is killed, and several at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import penstock
from penstock.errors import InUseError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.stores.directory_lock import claim_name
from penstock.kernel import Hold
from penstock.testing import lockless_store

LEFT = "a.orbax-checkpoint-tmp-new"
IS_KILLED = """
import fcntl, os, sys
from penstock.handlers.stores.local import LocalStore
from penstock.handlers.stores.file_system import SystemCalls

def killed(number, operation):
    os.kill(os.getpid(), 9)

LocalStore(calls=SystemCalls(flock=killed)).make_held(sys.argv[1])
"""


def kill_between(path: Path) -> None:
    """Have a process killed after it made the directory, and before it held and renamed it."""
    command = [sys.executable, "-c", IS_KILLED, str(path)]
    assert subprocess.run(command, check=False).returncode == -9


def test_what_a_killed_process_made_is_removed_by_the_next_save_to_that_path(tmp_path: Path) -> None:
    kill_between(tmp_path / "a.orbax-checkpoint-tmp")
    assert os.listdir(tmp_path) == [LEFT]
    assert penstock.sync.verify(tmp_path).leftovers == (str(tmp_path / LEFT),)

    penstock.sync.save(tmp_path / "a", {"x": 1})

    assert os.listdir(tmp_path) == ["a"]


def test_a_manager_removes_an_abandoned_directory(tmp_path: Path) -> None:
    (tmp_path / "7.orbax-checkpoint-tmp-new").mkdir()
    with penstock.sync.CheckpointManager(tmp_path) as manager:
        assert not any("tmp" in name for name in os.listdir(tmp_path))
        assert list(manager.all_steps()) == []


def test_what_another_one_holds_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a-new").mkdir()
    held = LocalStore().hold(str(tmp_path / "a-new"))
    with pytest.raises(InUseError) as caught:
        LocalStore().make_held(str(tmp_path / "a"))

    assert caught.value.path == str(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a-new"]
    held.release()


def test_without_locks_what_another_one_is_about_to_rename_is_left_alone(tmp_path: Path) -> None:
    """The right is to the name that it will have."""
    (tmp_path / "a-new").mkdir()
    claim = claim_name(str(tmp_path / "a"))
    with pytest.raises(InUseError, match="penstock-claim"):
        lockless_store().make_held(str(tmp_path / "a"))

    assert "a-new" in os.listdir(tmp_path)
    claim.release()


@pytest.mark.parametrize("has_locks", [True, False])
def test_what_nobody_holds_there_is_removed(tmp_path: Path, has_locks: bool) -> None:
    store = LocalStore() if has_locks else lockless_store()
    (tmp_path / "a-new").mkdir()

    held = store.make_held(str(tmp_path / "a"))

    assert {"a"} == {name for name in os.listdir(tmp_path) if not name.startswith(".")}
    held.release()


def test_files_there_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "a-new").mkdir()
    (tmp_path / "a-new" / "file").touch()

    with pytest.raises(StorageError, match="no save has put there"):
        LocalStore().make_held(str(tmp_path / "a"))

    assert os.listdir(tmp_path) == ["a-new"]
    LocalStore().hold(str(tmp_path / "a-new")).release()


def test_what_a_power_loss_brought_back_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "a.orbax-checkpoint-tmp-new"
    (left / "d").mkdir(parents=True)
    (left / "d" / "data").touch()
    (left / "_METADATA").touch()

    held = LocalStore().make_held(str(tmp_path / "a.orbax-checkpoint-tmp"))

    assert os.listdir(tmp_path) == ["a.orbax-checkpoint-tmp"]
    assert os.listdir(tmp_path / "a.orbax-checkpoint-tmp") == []
    held.release()


def test_where_something_lies_already_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(InUseError):
        LocalStore().make_held(str(tmp_path / "a"))

    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("has_locks", [True, False])
def test_of_many_who_find_what_was_left_one_succeeds(tmp_path: Path, has_locks: bool) -> None:
    n_threads, n_rounds = 4, 20
    barrier = threading.Barrier(n_threads)
    held: list[list[Hold]] = [[] for _ in range(n_rounds)]
    for number in range(n_rounds):
        (tmp_path / f"{number}-new").mkdir()

    def make() -> None:
        store = LocalStore() if has_locks else lockless_store()
        for number in range(n_rounds):
            barrier.wait(30)
            with suppress(InUseError):
                held[number].append(store.make_held(str(tmp_path / str(number))))

    threads = [threading.Thread(target=make) for _ in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert [len(found) for found in held] == [1] * n_rounds
    assert not [name for name in os.listdir(tmp_path) if name.endswith("-new")]
    for found in held:
        found[0].release()
