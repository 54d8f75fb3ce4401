"""Pages that are made before a save needs them."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Semaphore

import pytest
from anyio import create_task_group, to_thread

from penstock.handlers.stores.keeper.connection import Connection
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.keeper.messages import (
    Create,
    Found,
    Head,
    Reserve,
    encode_request,
)
from penstock.keeper.pages import STEP_BYTES, PagePool, Pages
from penstock.keeper.server import Keeper

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


class SteppedPool(PagePool):
    """Makes pages when it may."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, lambda: 2**40, 0)
        self.began = Event()
        self.may = Semaphore(0)

    def fill(self, pages: Pages, start: int, end: int) -> None:  # type: ignore[override]  # of this pool
        self.began.set()
        self.may.acquire()
        super().fill(pages, start, end)


@pytest.fixture
def path() -> Iterator[str]:
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="pk-", dir="/tmp") as folder:
        yield str(Path(folder) / "keeper")

    signal.signal(signal.SIGIO, before)


def created(path: str) -> int:
    """Return the number of a new file."""
    with closing(Connection(path, 60.0)) as connection:
        return connection.call("create", "file", Create("file"), Found)[0].number


async def test_a_save_that_begins_while_pages_are_made_ready_goes_on_with_these(path: str) -> None:
    nbytes = 3 * STEP_BYTES
    pool = SteppedPool(2 * nbytes)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    listener.setblocking(False)
    keeper, store = Keeper(path, pool), KeeperStore(path)
    async with create_task_group() as tasks:
        tasks.start_soon(keeper.serve, listener)
        await to_thread.run_sync(store.make_ready, nbytes)
        await to_thread.run_sync(pool.began.wait)
        number = await to_thread.run_sync(created, path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.connect(path)
            body = encode_request(Reserve(number, nbytes, nbytes, False))
            asking.sendall(Head.encode(body) + body)
            for _ in range(2):  # it has been asked before these are
                await to_thread.run_sync(store.status)

            pool.may.release(6)
            await to_thread.run_sync(asking.recv, 1)

        status = await to_thread.run_sync(store.status)
        assert status.fresh_bytes == status.kept_bytes == nbytes
        assert status.reused_bytes == STEP_BYTES, "the rest was made when it was asked for"
        assert status.pool_bytes == 0
        store.close()
        keeper.stop()
