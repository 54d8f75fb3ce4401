"""Holds where the file system has no locks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import InUseError, StorageError
from penstock.handlers.stores.directory_lock import check_name_is_free, claim_name
from penstock.testing import lockless_store

CLAIM = ".a.penstock-claim"
HOLDS_AND_IS_KILLED = """
import os, sys
from penstock.testing import lockless_store
held = lockless_store().hold(sys.argv[1])
os.kill(os.getpid(), 9)
"""


def test_a_claim_lies_beside_what_is_claimed_and_names_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    claim = claim_name(path)
    assert os.listdir(tmp_path) == [CLAIM]
    with pytest.raises(InUseError, match=f"process {os.getpid()} of .*remove {tmp_path}/{CLAIM}"):
        claim_name(path)
    with pytest.raises(InUseError, match=CLAIM):
        check_name_is_free(path)

    claim.release()
    check_name_is_free(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP])
def test_where_locks_are_refused_a_claim_takes_their_place(tmp_path: Path, error: int) -> None:
    store, other, path = lockless_store(error), lockless_store(error), str(tmp_path / "a")
    held = store.make_held(path)
    assert sorted(os.listdir(tmp_path)) == [CLAIM, "a"]
    for take in (other.hold, other.hold_reading, other.make_held):
        with pytest.raises(InUseError):
            take(path)

    held.release()
    assert os.listdir(tmp_path) == ["a"]
    other.hold_reading(path).release()
    other.hold(path).release()


def test_another_failure_of_a_lock_is_none_of_the_file_system(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        lockless_store(errno.EIO).hold(str(tmp_path))

    assert caught.value.errno == errno.EIO
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_claimed_is_free_to_hold_and_to_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path, store = str(tmp_path / "a"), lockless_store()
    for take in (store.hold_reading, store.hold):
        command = [sys.executable, "-c", HOLDS_AND_IS_KILLED, path]
        assert subprocess.run(command, check=False).returncode == -9
        assert sorted(os.listdir(tmp_path)) == [CLAIM, "a"]
        take(path).release()
        assert os.listdir(tmp_path) == ["a"]
