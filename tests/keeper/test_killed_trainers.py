"""A process that is killed at any moment of a save leaves the old step or the new one, and frees memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing

import pytest
from tests.keeper.conftest import Start

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PROGRAM = r"""
import json, os, signal, sys, time

sys.argv = ["penstock"]  # imports less
from penstock.handlers.stores.keeper.connection import Connection
from penstock.handlers.stores.keeper.keeper_store import KeeperStore

SOCKET, WHEN = os.environ["KEEPER"], os.environ["WHEN"]
FINAL, PLACE, NBYTES = "/run/1", "/run/1.tmp", 2**21


def content(number):
    return bytes([number % 251]) * NBYTES


def save(store, number):
    "The calls of a save over an earlier step."
    hold = store.make_held(PLACE)
    token = store.begin_build(FINAL, PLACE)
    store.make_directory(f"{PLACE}/d")
    file = store.create_data_file(f"{PLACE}/d/data")
    file.allocate(NBYTES)
    file.write_at(0, [memoryview(content(number))[: NBYTES // 2]])
    file.write_at(NBYTES // 2, [memoryview(content(number))[NBYTES // 2 :]])
    file.sync()
    file.close()
    store.write_file(f"{PLACE}/document", bytes([number % 251]))
    if store.kind(FINAL) is None:
        store.publish(token)
    else:
        store.exchange(token)
    store.discard(token)
    hold.release()


class Killing:
    "Counts the calls of this process, and kills it at the nth: before it is asked, or once it is answered."

    def __init__(self, n):
        self.n, self.calls, self.call = n, 0, Connection.call
        Connection.call = lambda connection, *given: self.around(connection, *given)

    def around(self, connection, *given):
        self.calls += 1
        if self.calls == self.n and WHEN == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = self.call(connection, *given)
        if self.calls == self.n and WHEN == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def state(store):
    "Which step is there; None as long as something of a killed process is."
    try:
        store.hold(FINAL).release()
    except OSError as error:
        assert error.errno == 16, error
        return None
    if list(store.list_directory("/run")) != ["1"]:
        return None
    number = store.read_file(f"{FINAL}/document")[0]
    assert store.read_file(f"{FINAL}/d/data") == content(number), "a mixture"
    return number


store = KeeperStore(SOCKET)
save(store, 0)
found, was = [], 0
for n in range(1, 100):
    child = os.fork()
    if not child:
        Killing(n)
        save(KeeperStore(SOCKET), n)
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
    deadline = time.monotonic() + 60
    while (now := state(store)) is None:
        assert time.monotonic() < deadline, store.list_directory("/run")
    assert now in (was, n), (was, n, now)
    found.append(now == n)
    was = now
    if os.WIFEXITED(ended):
        break

print(json.dumps(found))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_killed_at_any_call_leaves_one_whole_step_and_no_pages(start: Start, when: str) -> None:
    keeper = start(limit_bytes=2**24)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "KEEPER": keeper.socket,
        "WHEN": when,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    is_new: list[bool] = json.loads(done.stdout)
    assert len(is_new) > 10, "each call of a save is visited"
    assert is_new == sorted(is_new), "from some call on, and no earlier, the new step is there"
    assert not is_new[0]
    assert is_new[-1]
    with closing(keeper.store()) as store:
        store.free_bytes("/run")
        status = store.status()
        assert [(step.path, step.state) for step in status.steps] == [("run/1", "whole")]
        assert status.kept_bytes < 2**21 + 2**12
        assert status.lingering_bytes == 0
        assert status.used_bytes <= 2 * 2**21 + 2**20, (
            "what killed processes had is used again, or given back"
        )
