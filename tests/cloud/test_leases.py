"""A saver and its manager are killed or stopped, and another process opens the manager in their place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.lease_holder import opened
from tests.cloud.servers import Server

import penstock
from penstock.errors import ClaimLostError, RootInUseError, StorageError
from penstock.handlers.stores.buckets import MARK

pytestmark = pytest.mark.timeout(240)

LEASE_S = 3.0
FACES = ("penstock", "orbax")


@pytest.fixture(autouse=True)
def short_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text("".join([f"[store.{scheme}]\nlease_s = {LEASE_S}\n" for scheme in ("s3", "gs", "az")]))
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))


class Holder:
    """A process that holds a root."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.heard()


@contextmanager
def holder(server: Server, face: str, root: str) -> Generator[Holder]:
    """Run a process that holds a root, and has saved step 1."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cloud.lease_holder", face, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **server.environ()},
        cwd=Path(__file__).parents[2],
        text=True,
    )
    found = Holder(process)
    try:
        assert found.heard() == "opened"
        yield found
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def replacement(root: str) -> tuple[Any, float]:
    """Open a manager as soon as that is possible; return it, and how many seconds that took."""
    since = time.monotonic()
    while True:
        try:
            return opened("penstock", root), time.monotonic() - since
        except RootInUseError:
            time.sleep(0.1)  # as a pod that is started again and again


@pytest.mark.parametrize("face", FACES)
def test_the_pod_that_replaces_a_killed_one_opens_its_manager_and_saves(environ: Server, face: str) -> None:
    root = f"{environ.url()}/run"
    with holder(environ, face, root) as dead:
        assert dead.ask("hang 2") == "hangs"
        dead.process.kill()
        dead.process.wait()
        manager, took_s = replacement(root)

    assert took_s < LEASE_S + 30, "and no hand was needed"
    assert sorted(manager.steps()) in ([1], [1, 2]), "step 2 was about to be published, and may be"
    manager.save(5)
    manager.close()
    # Its save was renewed a moment later than its hold; who opens now finds the lease of that over, too.
    time.sleep(LEASE_S)
    manager, _ = replacement(root)
    assert sorted(manager.steps()) == [1, 2, 5], "rolled forward, never back"
    manager.close()
    for step in (1, 2, 5):
        assert penstock.sync.restore(f"{root}/{step}") is not None
        assert penstock.sync.verify(f"{root}/{step}").intact


@pytest.mark.parametrize("face", FACES)
def test_who_was_stopped_for_longer_than_its_lease_finds_out(environ: Server, face: str) -> None:
    root = f"{environ.url()}/run"
    with holder(environ, face, root) as stopped:
        stopped.process.send_signal(signal.SIGSTOP)
        manager, took_s = replacement(root)
        assert took_s > LEASE_S / 2, "as long as it was renewed nobody could open"
        manager.save(2)
        stopped.process.send_signal(signal.SIGCONT)
        assert stopped.ask("delete 1") == ClaimLostError.__name__
        assert stopped.ask("save 3") == ClaimLostError.__name__
        manager.save(4)
        manager.close()

    with penstock.sync.CheckpointManager(root, read_only=True) as reader:
        assert list(reader.all_steps()) == [1, 2, 4]


@pytest.mark.parametrize("face", FACES)
def test_who_was_stopped_and_not_replaced_goes_on(environ: Server, face: str) -> None:
    root = f"{environ.url()}/run"
    with holder(environ, face, root) as stopped:
        stopped.process.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S + 1)
        stopped.process.send_signal(signal.SIGCONT)
        assert stopped.ask("save 2") == "done"
        assert stopped.ask("delete 1") == "done"
        with pytest.raises(RootInUseError):
            opened("penstock", root)


def test_a_manager_that_only_waits_keeps_its_root(environ: Server) -> None:
    root = f"{environ.url()}/run"
    with holder(environ, "orbax", root), holder(environ, "penstock", f"{root}-2") as other:
        time.sleep(3 * LEASE_S)
        for each in (root, f"{root}-2"):
            with pytest.raises(RootInUseError):
                opened("penstock", each)

        assert other.ask("save 2") == "done"


def test_a_copy_that_was_interrupted_is_no_step(environ: Server) -> None:
    root = f"{environ.url()}/run"
    manager = opened("penstock", root)
    manager.save(1)
    manager.close()
    store = environ.bucket_store()
    for name in store.list_directory(f"{root}/1"):
        if name != MARK and store.kind(f"{root}/1/{name}") == "file":
            store.write_file(f"{root}/2/{name}", store.read_file(f"{root}/1/{name}"))

    with penstock.sync.CheckpointManager(root, read_only=True) as reader:
        assert reader.latest_step() == 1
    with pytest.raises((penstock.errors.CorruptCheckpointError, StorageError), match=f"has no {MARK}"):
        penstock.sync.restore(f"{root}/2")
    assert penstock.sync.gc(root).unmarked == (f"{root}/2",)
