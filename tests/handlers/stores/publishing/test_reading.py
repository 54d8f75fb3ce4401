"""What is read is of one state, although it is replaced meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import (
    ChecksumError,
    InUseError,
    NoSpaceError,
    PenstockError,
    ReplacedError,
    StorageError,
)
from penstock.handlers import LocalStore
from penstock.handlers.stores.publishing.reading import MOST_READS, Reading, read_unchanged, reading
from penstock.kernel import Threads
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio


class Source:
    """A directory that is replaced whenever the test says."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "c"
        self.turn = 0
        self.path.mkdir()

    def replace(self) -> None:
        self.turn += 1
        new = self.path.with_name(f"new{self.turn}")
        new.mkdir()
        self.path.rename(self.path.with_name(f"old{self.turn}"))
        new.rename(self.path)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


async def test_a_checkpoint_is_read_again_until_it_stays(source: Source) -> None:
    seen: list[int] = []

    async def read(_: Reading) -> int:
        seen.append(source.turn)
        if len(seen) < 3:
            source.replace()
            raise StorageError("read", "inside", "is gone")  # the replacement explains it

        return seen[-1]

    assert await read_unchanged(LocalStore(), Threads(), str(source.path), read) == 2
    assert seen == [0, 1, 2]


async def test_reading_is_given_up_in_the_end(source: Source) -> None:
    async def read(_: Reading) -> None:
        source.replace()

    with pytest.raises(ReplacedError, match=f"was replaced {MOST_READS} times") as raised:
        await read_unchanged(LocalStore(), Threads(), str(source.path), read)

    assert (raised.value.path, raised.value.times, source.turn) == (str(source.path), 10, 10)


async def test_what_is_damaged_is_not_read_again(source: Source) -> None:
    attempts: list[int] = []

    async def read(_: Reading) -> None:
        attempts.append(1)
        raise ChecksumError("inside", "differs")

    with pytest.raises(ChecksumError):
        await read_unchanged(LocalStore(), Threads(), str(source.path), read)

    assert len(attempts) == 1


async def test_what_is_published_is_not_judged_by_what_comes_later(source: Source) -> None:
    async def publish(it: Reading) -> str:
        await it.end()
        source.replace()
        return "published"

    async def fail(it: Reading) -> None:
        await it.end()
        source.replace()
        raise NoSpaceError("write", "there", 2, 1, None)

    assert await read_unchanged(LocalStore(), Threads(), str(source.path), publish) == "published"
    with pytest.raises(NoSpaceError):
        await read_unchanged(LocalStore(), Threads(), str(source.path), fail)


async def test_nothing_is_published_of_what_was_replaced(source: Source) -> None:
    published: list[int] = []

    async def publish(it: Reading) -> None:
        if not source.turn:
            source.replace()

        await it.end()
        published.append(source.turn)

    await read_unchanged(LocalStore(), Threads(), str(source.path), publish)
    assert published == [1]


async def test_who_reads_another_path_inside_is_not_overtaken_by_it(source: Source, tmp_path: Path) -> None:
    attempts: list[int] = []

    async def read(_: Reading) -> None:
        attempts.append(1)
        raise ReplacedError(str(tmp_path / "another"))

    with pytest.raises(ReplacedError, match="another"):
        await read_unchanged(LocalStore(), Threads(), str(source.path), read)

    assert len(attempts) == 1


async def test_a_checkpoint_is_held_as_asked_and_let_go(source: Source) -> None:
    store, path = LocalStore(), str(source.path)
    async with reading(store, Threads(), path):
        store.hold_reading(path).release()
        with pytest.raises(InUseError):
            store.hold(path)

    async with reading(store, Threads(), path, store.hold):
        with pytest.raises(InUseError):
            store.hold_reading(path)

    with pytest.raises(PenstockError):
        async with reading(store, Threads(), path):
            source.replace()

    held = store.hold(path)
    async with reading(store, Threads(), path):  # what cannot be held is read nevertheless
        pass
    with pytest.raises(InUseError):
        async with reading(store, Threads(), path, store.hold):
            pass

    held.release()


async def test_the_new_one_is_held_once_it_is_read_again(source: Source) -> None:
    store, path = LocalStore(), str(source.path)

    async def read(_: Reading) -> None:
        with pytest.raises(InUseError):
            store.hold(path)
        if not source.turn:
            source.replace()

    await read_unchanged(store, Threads(), path, read)
    assert source.turn == 1


async def test_a_read_fails_if_the_identity_of_its_checkpoint_cannot_be_read(source: Source) -> None:
    store = FaultyStore(LocalStore())
    store.fail_on("identity", 2)

    async def read(_: Reading) -> None: ...

    with pytest.raises(StorageError):
        await read_unchanged(store, Threads(), str(source.path), read)
