"""A keeper outlives what goes wrong in one of its tasks: it may hold what no other tier has."""

from __future__ import annotations

import os

import pytest
from tests.keeper.conftest import RunningKeeper, Start

from penstock.errors import StorageError
from penstock.handlers.stores.keeper.connection import Connections
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.keeper.messages import Finish, Request, Reserve, Reserved, TakeOver

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

IS_ALSO_ABOUT = ("handlers.stores.keeper",)

LONG = "x" * 2**17
"""Linux starts no process with a variable that is so long."""


def publish_as_one_who_dies(store: KeeperStore, run: str) -> None:
    """Publish a step under a writer's hold that breaks."""
    store.make_directory(f"{run}/.penstock-writer")
    hold = store.hold(f"{run}/.penstock-writer")
    store.make_directory(f"{run}/7.tmp")
    store.write_file(f"{run}/7.tmp/file", b"content")
    store.publish(store.begin_build(f"{run}/7", f"{run}/7.tmp"))
    hold.break_off()


def ask(keeper: RunningKeeper, request: Request, answer: type[object]) -> None:
    """Ask as a store never does."""
    connections = Connections(keeper.socket, 30.0)
    try:
        for descriptor in connections.call_for_file("ask", "a path", request, answer)[1]:
            os.close(descriptor)
    finally:
        connections.close()


def test_one_that_cannot_start_what_finishes_steps_keeps_them(start: Start) -> None:
    keeper = start()
    ask(keeper, TakeOver("run", {"LONG": LONG}, "/"), type(None))
    store = keeper.store()
    publish_as_one_who_dies(store, "/run")

    for _ in range(3):  # by then it has tried
        assert store.read_file("/run/7/file") == b"content"
    assert [step.path for step in store.status().steps] == ["run/7"]


@pytest.mark.parametrize("request_", [Reserve(1, -1, 1, True), Reserve(1, 1, -1, True), Finish(1, -1, True)])
def test_a_length_below_zero_is_no_message(keeper: RunningKeeper, request_: Request) -> None:
    with pytest.raises(StorageError, match=">= 0"):
        ask(keeper, request_, Reserved)

    assert keeper.store().status().pid == keeper.process.pid


def test_a_path_is_no_longer_than_one_of_a_file_system(keeper: RunningKeeper) -> None:
    with pytest.raises(StorageError, match="no possible path"):
        keeper.store().make_directory("/deep" + "/d" * 5000)


def test_the_deepest_path_is_looked_through(keeper: RunningKeeper) -> None:
    store = keeper.store()
    deepest = "/" + "d/" * 2000 + "d"
    store.make_directory(deepest)
    store.write_file(f"{deepest}/f", b"content")
    assert store.status().kept_bytes == len(b"content")
    store.remove_tree("/d")
    assert store.status().kept_bytes == 0
