"""Claims: files that one process alone can create, on the local file system and in any store."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2s
from pathlib import Path

import pytest

from penstock.errors import InUseError
from penstock.handlers.stores.publishing.claims import Claim, StoreClaimFiles, check_unclaimed
from penstock.handlers.stores.publishing.process_identity import ProcessIdentity
from penstock.testing import MemoryStore

FILE, PATH = "/run/.claim", "/run/a"


@pytest.fixture
def files() -> StoreClaimFiles:
    store = MemoryStore()
    store.make_directory("/run")
    return StoreClaimFiles(store)


def dead(**changes: object) -> bytes:
    """The claim of a process of this machine that has ended: the number is one that is never used."""
    return json.dumps(json.loads(ProcessIdentity.mine().encode()) | {"pid": 2**30} | changes).encode()


def removal_of(data: bytes) -> str:
    return f"{FILE}-{blake2s(data, digest_size=6).hexdigest()}"


def test_a_name_is_claimed_by_one_at_a_time(files: StoreClaimFiles) -> None:
    first = Claim(files, FILE, PATH)
    for attempt in (lambda: Claim(files, FILE, PATH), lambda: check_unclaimed(files, FILE, PATH)):
        with pytest.raises(InUseError, match=f"process {os.getpid()} of .*remove {FILE}") as caught:
            attempt()
        assert caught.value.errno == errno.EBUSY

    first.release()
    first.release()
    second = Claim(files, FILE, PATH)
    first.release()  # gives up nothing of the second one
    assert files.read(FILE) is not None
    second.release()
    assert files.read(FILE) is None
    check_unclaimed(files, FILE, PATH)


def test_the_claim_of_a_process_that_has_ended_is_removed(files: StoreClaimFiles) -> None:
    files.create(FILE, dead())
    check_unclaimed(files, FILE, PATH)
    assert files.read(FILE) is None

    files.create(FILE, dead())
    claim = Claim(files, FILE, PATH)
    with pytest.raises(InUseError, match=f"process {os.getpid()} "):
        Claim(files, FILE, PATH)

    claim.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff", dead(host="x", boot="x")])
def test_a_claim_that_cannot_be_judged_holds(files: StoreClaimFiles, content: bytes) -> None:
    files.create(FILE, content)
    with pytest.raises(InUseError, match=f"if that has ended, remove {FILE}"):
        Claim(files, FILE, PATH)

    assert files.read(FILE) == content


def test_while_one_removes_a_claim_nobody_else_does(files: StoreClaimFiles) -> None:
    data = dead()
    files.create(FILE, data)
    removal = Claim(files, removal_of(data), PATH)
    with pytest.raises(InUseError, match=removal_of(data)):
        Claim(files, FILE, PATH)

    assert files.read(FILE) == data
    removal.release()
    Claim(files, FILE, PATH).release()


def test_a_removal_whose_process_was_killed_is_taken_over(files: StoreClaimFiles) -> None:
    data = dead()
    files.create(FILE, data)
    files.create(removal_of(data), dead(id="of the removal"))
    Claim(files, FILE, PATH).release()
    assert files.read(FILE) is None
    assert files.read(removal_of(data)) is None


class Overtaken:
    """Claim files in which another one is faster: something happens before the n-th reading."""

    def __init__(self, inner: StoreClaimFiles, at: int, happens: Callable[[], object]) -> None:
        self._inner, self._left, self._happens = inner, at, happens

    def create(self, file: str, data: bytes) -> bool:
        return self._inner.create(file, data)

    def read(self, file: str) -> bytes | None:
        self._left -= 1
        if not self._left:
            self._happens()

        return self._inner.read(file)

    def remove(self, file: str) -> None:
        self._inner.remove(file)


def test_the_claim_that_follows_a_dead_one_is_not_removed(files: StoreClaimFiles) -> None:
    files.create(FILE, dead())
    others: list[Claim] = []

    def another_is_faster() -> None:
        files.remove(FILE)
        others.append(Claim(files, FILE, PATH))

    # Between the look at the dead claim and the second one, when its removal is claimed.
    overtaken = Overtaken(files, 2, another_is_faster)
    with pytest.raises(InUseError):
        Claim(overtaken, FILE, PATH)

    with pytest.raises(InUseError, match=f"process {os.getpid()} "):
        check_unclaimed(files, FILE, PATH)

    others[0].release()
    assert files.read(FILE) is None


FORKS = """
import os, sys
from penstock.kernel.errors import InUseError
from penstock.testing import lockless_store
held = lockless_store().hold(sys.argv[1])
if not os.fork():
    held.release()
    os._exit(0)
os.wait()
try:
    lockless_store().hold(sys.argv[1])
except InUseError:
    held.release()
    lockless_store().hold(sys.argv[1]).release()
    print("still held")
"""


def test_a_fork_gives_up_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    assert subprocess.check_output(command, timeout=100) == b"still held\n"
