"""A keeper that ends, stands still or has no room: an error in a limited time, and nothing half done."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.keeper.conftest import Start, start_at

from penstock import Checkpointer
from penstock.errors import ClaimLostError, ConfigError, KeeperLostError, NoSpaceError, StorageError
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.keeper.messages import MOST_BYTES, Head, Look, encode_request

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

OPERATIONS: dict[str, Callable[[KeeperStore, Any], object]] = {
    "kind": lambda store, _: store.kind("/a"),
    "size": lambda store, _: store.size("/a/file"),
    "identity": lambda store, _: store.identity("/a"),
    "list_directory": lambda store, _: store.list_directory("/a"),
    "check_writable": lambda store, _: store.check_writable("/a/new"),
    "free_bytes": lambda store, _: store.free_bytes("/a"),
    "make_directory": lambda store, _: store.make_directory("/a/new"),
    "remove_tree": lambda store, _: store.remove_tree("/a"),
    "rename": lambda store, _: store.rename("/a", "/b"),
    "read_file": lambda store, _: store.read_file("/a/file"),
    "write_file": lambda store, _: store.write_file("/a/file", b"new"),
    "write_file of a long one": lambda store, _: store.write_file("/a/long", bytes(2**20)),
    "create_data_file": lambda store, _: store.create_data_file("/a/data"),
    "open_data_file": lambda store, _: store.open_data_file("/a/file"),
    "open_for_writing": lambda store, _: store.open_for_writing("/a/begun"),
    "map_file": lambda store, _: store.map_file("/a/file"),
    "share": lambda store, _: store.share("/a/file", "/a/second"),
    "publish": lambda store, _: store.publish(store.begin_build("/b", "/a")),
    "hold": lambda store, _: store.hold("/a"),
    "hold_reading": lambda store, _: store.hold_reading("/a"),
    "make_held": lambda store, _: store.make_held("/a/held"),
    "status": lambda store, _: store.status(),
    "stop": lambda store, _: store.stop(),
    "allocate": lambda _, file: file.allocate(2**20),
    "write_at": lambda _, file: file.write_at(2**20, [memoryview(b"bytes")]),
    "sync": lambda _, file: file.sync(),
}


@pytest.fixture(scope="module")
def lost(short_folder: Path) -> Iterator[Mapping[str, tuple[KeeperStore, Any]]]:
    """For each operation a store, and a file that it wrote; their one keeper was killed."""
    keeper = start_at(str(Path(tempfile.mkdtemp(dir=short_folder)) / "keeper"), 2**28, float("inf"))
    found: dict[str, tuple[KeeperStore, Any]] = {}
    with ExitStack() as stack:
        for name in OPERATIONS:
            store = keeper.store()
            store.make_directory("/a")
            store.write_file("/a/file", b"content")
            file = stack.enter_context(closing(store.create_data_file(f"/a/begun for {name}")))
            file.write_at(0, [memoryview(b"begun")])
            found[name] = store, file

        keeper.kill()
        yield found


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_a_keeper_each_operation_is_an_error(
    lost: Mapping[str, tuple[KeeperStore, Any]], name: str
) -> None:
    store, file = lost[name]
    with pytest.raises(KeeperLostError) as caught:
        OPERATIONS[name](store, file)

    assert "/keeper" in str(caught.value)


def test_one_that_stands_still_is_an_error_after_the_limit_at_each_operation(start: Start) -> None:
    keeper = start()
    store, answer_s = keeper.store(), 0.5
    store.make_directory("/a")
    store.write_file("/a/file", b"content")
    slow = keeper.store(answer_s)
    with closing(slow.create_data_file("/a/begun")) as file:
        keeper.send(signal.SIGSTOP)
        waited_s = list[float]()
        for name, operation in OPERATIONS.items():
            began = time.monotonic()
            with pytest.raises(KeeperLostError) as caught:
                operation(slow, file)

            assert caught.value.errno == errno.ETIMEDOUT, name
            waited_s.append(time.monotonic() - began)

        assert waited_s[0] >= answer_s, "it is waited for"
        assert min(waited_s) >= answer_s / 10, "and then for less"
        keeper.send(signal.SIGCONT)

    try:
        found = store.read_file("/a/file")
    except StorageError:  # to remove or rename it, or to stop the keeper, was asked, too
        found = b""

    assert found in {b"", b"content", b"new"}, "what was asked is done late, or not at all"


def test_a_hold_is_lost_with_its_keeper(start: Start) -> None:
    keeper = start()
    store = keeper.store()
    store.make_directory("/a")
    hold = store.hold("/a")
    hold.confirm()
    keeper.kill()
    with pytest.raises(ClaimLostError):
        hold.confirm()

    hold.release()


def test_a_new_keeper_is_used_once_it_is_there_and_is_empty(start: Start) -> None:
    keeper = start()
    store = keeper.store()
    store.make_directory("/a")
    identity = store.identity("/a")
    keeper.kill()
    start(socket=keeper.socket)
    assert store.kind("/a") is None
    store.make_directory("/a")
    assert store.identity("/a") != identity


async def test_a_save_into_a_keeper_that_ends_fails_and_the_next_one_goes_on(start: Start) -> None:
    keeper = start()
    async with Checkpointer(store=keeper.store()) as checkpointer:
        await (await checkpointer.save("/run/1", {"a": np.arange(1000)}))
        keeper.kill()
        with pytest.raises(KeeperLostError):
            await (await checkpointer.save("/run/2", {"a": np.arange(1000)}))

        start(socket=keeper.socket)
        await (await checkpointer.save("/run/2", {"a": np.arange(1000)}))
        assert (await checkpointer.restore("/run/2"))["a"].sum() == 499500


async def test_a_save_that_does_not_fit_is_an_error_with_bytes_and_leaves_nothing(start: Start) -> None:
    keeper = start(limit_bytes=2**22)
    async with Checkpointer(store=keeper.store()) as checkpointer:
        await (await checkpointer.save("/run/1", {"a": np.arange(1000)}))
        with pytest.raises(NoSpaceError) as caught:
            await (await checkpointer.save("/run/2", {"a": np.zeros(2**20)}))

        assert caught.value.bytes_needed >= 2**23
        assert caught.value.bytes_free is not None
        assert caught.value.bytes_free <= 2**22
        assert list(keeper.store().list_directory("/run")) == ["1"]
        await (await checkpointer.save("/run/3", {"a": np.arange(1000)}))


def test_pages_that_cannot_be_reserved_are_an_error_and_what_there_is_can_still_be_used(start: Start) -> None:
    store = start(limit_bytes=2**22).store()
    with closing(store.create_data_file("/file")) as file:
        file.write_at(0, [memoryview(b"x" * 2**21)])
        with pytest.raises(StorageError) as caught:
            file.write_at(2**21, [memoryview(b"x" * 2**22)])

        assert caught.value.errno == errno.ENOSPC
        file.write_at(2**21, [memoryview(b"y" * 2**20)])
        file.sync()

    assert store.read_file("/file") == b"x" * 2**21 + b"y" * 2**20


def test_what_is_no_message_ends_that_connection_alone(start: Start) -> None:
    keeper = start()
    store = keeper.store()
    store.make_directory("/a")
    good = encode_request(Look(["a"]))
    for sent in (
        b"\xff" * 5,
        struct.pack("<IB", MOST_BYTES + 1, 0),
        Head.encode(b"\xc1") + b"\xc1",
        Head.encode(b"\x01") + b"\x01",
        Head.encode(good[:-1]) + good[:-1],
        struct.pack("<IB", len(good), 7) + good,
        b"\x02",
    ):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(keeper.socket)
            raw.settimeout(30)
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                while raw.recv(4096):
                    pass

        assert store.kind("/a") == "directory"


def test_a_socket_whose_folder_others_can_open_is_refused(start: Start) -> None:
    keeper = start()
    folder = os.path.dirname(keeper.socket)
    os.chmod(folder, 0o755)
    with pytest.raises(KeeperLostError, match="open to other users"):
        keeper.store().status()

    os.chmod(folder, 0o700)
    assert keeper.store().status().pid == keeper.process.pid


def test_a_socket_with_too_long_a_path_is_refused_before_anything() -> None:
    with pytest.raises(ConfigError, match="107 bytes"):
        KeeperStore("/tmp/" + "x" * 110)


def test_what_is_written_after_a_new_keeper_has_come_is_in_that_one(start: Start) -> None:
    keeper, data = start(), b"12345678" * 2**18
    store, other = keeper.store(), keeper.store()

    def write(name: str) -> None:
        with closing(store.create_data_file(f"/{name}")) as file:
            file.allocate(len(data))
            file.write_at(0, [memoryview(data)])
            file.sync()

    store.make_directory("/tmp")
    write("tmp/published")
    store.publish(store.begin_build("/published", "/tmp"))
    for _ in range(3):  # the same pages, which stay mapped
        write("a")
        store.remove_tree("/a")

    assert store.status().reused_bytes >= 2 * len(data)
    keeper.kill()
    start(socket=keeper.socket)
    for _ in range(3):
        write("a")
        assert other.read_file("/a") == data
        store.remove_tree("/a")
