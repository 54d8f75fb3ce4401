"""The store of a keeper's memory: what every store does, and what is its own."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

import pytest
from tests.keeper.conftest import RunningKeeper, Start

from penstock.errors import BuildChangedError, InUseError, StorageError, TruncatedDataError
from penstock.handlers.stores.keeper.keeper_files import SplicePipe
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.handlers.stores.keeper.messages import MOST_DOCUMENT_BYTES, MOST_NAMES
from penstock.kernel import Store
from penstock.testing import (
    DirectoryConformance,
    ExchangeConformance,
    FreeSpaceConformance,
    HoldConformance,
    ListingConformance,
    LongFileConformance,
    MappingConformance,
    RenameConformance,
    SharingConformance,
    StoreConformance,
    WritingTogetherConformance,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


class TestKeeperStore(
    StoreConformance,
    DirectoryConformance,
    ExchangeConformance,
    FreeSpaceConformance,
    HoldConformance,
    ListingConformance,
    LongFileConformance,
    MappingConformance,
    RenameConformance,
    SharingConformance,
    WritingTogetherConformance,
):
    keeper: ClassVar[RunningKeeper]

    @pytest.fixture(autouse=True)
    def _with_a_keeper(self, keeper: RunningKeeper) -> None:
        type(self).keeper = keeper

    def make_store(self) -> Store:
        return self.keeper.store()

    def root(self, tmp_path: Path) -> str:
        self.make_store().make_directory(str(tmp_path))
        return str(tmp_path)


@pytest.fixture
def store(keeper: RunningKeeper) -> Iterator[KeeperStore]:
    with closing(keeper.store()) as store:
        yield store


@pytest.fixture
def root(store: KeeperStore, request: pytest.FixtureRequest) -> Iterator[str]:
    path = f"/{request.node.name}"
    store.make_directory(path)
    yield path
    store.remove_tree(path)


def test_it_is_no_store_of_system_files(store: KeeperStore) -> None:
    assert (store.directories, store.shared_files) == (store, store)
    assert (store.system_files, store.objects, store.kvstore_spec("/a")) == (None, None, None)


@pytest.mark.parametrize(
    "path", ["keeper:///run/7", "keeper://localhost/run/7", "/run/7", "keeper:/run/7"], ids=str
)
def test_an_url_and_a_path_lead_to_one_place(store: KeeperStore, path: str) -> None:
    store.make_directory("/run/7")
    try:
        assert store.identity(path) == store.identity("/run/7") is not None
    finally:
        store.remove_tree("/run")


@pytest.mark.parametrize("nbytes", [MOST_DOCUMENT_BYTES, MOST_DOCUMENT_BYTES + 1, 5 * 2**20])
def test_a_document_of_any_length_is_created_and_replaced_whole(
    store: KeeperStore, root: str, nbytes: int
) -> None:
    path, first, second = f"{root}/document", b"1" * nbytes, b"2" * nbytes
    assert store.write_file(path, first, create=True) is True
    assert store.write_file(path, first, create=True) is False
    with pytest.raises(StorageError) as caught:
        store.write_file(path, second, create=True)

    assert caught.value.errno == errno.EEXIST
    assert store.read_file(path) == first
    assert store.write_file(path, second) is True
    assert store.read_file(path) == second
    assert list(store.list_directory(root)) == ["document"]


def test_a_directory_with_more_names_than_a_message_takes_is_listed_whole(
    store: KeeperStore, root: str
) -> None:
    names = [f"{number:05}" for number in range(2 * MOST_NAMES + 1)]
    for name in names:
        store.write_file(f"{root}/{name}", b"")

    assert list(store.list_directory(root)) == names
    assert set(store.file_sizes([f"{root}/{name}" for name in names])) == {0}


def test_what_was_not_written_reads_as_zeros_also_in_pages_that_were_used(
    store: KeeperStore, root: str
) -> None:
    def write(name: str, *parts: tuple[int, bytes]) -> bytes:
        with closing(store.create_data_file(f"{root}/{name}")) as file:
            file.allocate(3 * 2**20)
            for offset, data in parts:
                file.write_at(offset, [memoryview(data)])

            file.sync()

        return store.read_file(f"{root}/{name}")

    store.publish(store.begin_build(f"{root}/published", _step(store, root, 3 * 2**20)))
    write("used", (0, b"x" * 3 * 2**20))
    store.remove_tree(f"{root}/used")
    reused = store.status().reused_bytes
    found = write("new", (2**20, b"a" * 10), (10, b"b"), (2 * 2**20, b"c"))

    assert store.status().reused_bytes > reused, "its pages had been used before"
    expected = bytearray(2 * 2**20 + 1)
    expected[10:11], expected[2**20 : 2**20 + 10], expected[-1:] = b"b", b"a" * 10, b"c"
    assert found == expected


def test_a_file_that_is_mapped_is_not_used_again_until_it_is_not(store: KeeperStore, root: str) -> None:
    nbytes = 4 * 2**20
    store.publish(store.begin_build(f"{root}/published", _step(store, root, nbytes)))
    pattern = bytes(range(256)) * (nbytes // 256)
    with closing(store.create_data_file(f"{root}/file")) as file:
        file.write_at(0, [memoryview(pattern)])
        file.sync()

    view = store.map_file(f"{root}/file")
    store.remove_tree(f"{root}/file")
    assert store.status().lingering_bytes >= nbytes
    with closing(store.create_data_file(f"{root}/other")) as file:
        file.write_at(0, [memoryview(bytes(nbytes))])
        file.sync()

    assert view == pattern, "what a reader has mapped must never change"
    del view
    store.free_bytes(root)  # looks whether somebody still reads
    assert store.status().lingering_bytes == 0


def test_a_reader_gets_what_it_cannot_write(store: KeeperStore, root: str) -> None:
    with closing(store.create_data_file(f"{root}/file")) as file:
        file.write_at(0, [memoryview(b"bytes")])
        file.sync()

    assert store.map_file(f"{root}/file").readonly
    with closing(store.open_data_file(f"{root}/file")) as file, pytest.raises(TruncatedDataError):
        file.read_at(3, [memoryview(bytearray(3))])


def test_a_build_that_another_one_took_away_is_not_published(store: KeeperStore, root: str) -> None:
    token = store.begin_build(f"{root}/final", f"{root}/final.tmp")
    hold = store.make_held(token.place)
    store.rename(token.place, f"{root}/elsewhere")
    store.make_directory(token.place)
    with pytest.raises(BuildChangedError):
        store.publish(token)

    assert store.kind(f"{root}/final") is None
    hold.release()


def test_what_replaced_nothing_of_ours_is_not_removed(store: KeeperStore, root: str) -> None:
    final = f"{root}/final"
    store.publish(store.begin_build(final, _step(store, root, 10, "final.tmp")))
    token = store.begin_build(final, _step(store, root, 10, "final.tmp"))
    store.exchange(token)
    store.rename(final, f"{root}/taken")
    with pytest.raises(BuildChangedError) as caught:
        store.discard(token)

    assert caught.value.older == token.place
    assert store.kind(f"{token.place}/file") == "file"


def test_a_place_that_is_there_cannot_be_made(store: KeeperStore, root: str) -> None:
    with pytest.raises(InUseError):
        store.make_held(root)


@pytest.mark.parametrize("name", ["", ".", "..", "a\0b", "n" * 256])
def test_a_name_that_no_file_can_have_is_refused(store: KeeperStore, root: str, name: str) -> None:
    with pytest.raises(StorageError) as caught:
        store.write_file(f"{root}/{name}/file", b"")

    assert caught.value.errno in {errno.EINVAL, errno.ENOENT}


def test_the_root_is_neither_removed_nor_moved(store: KeeperStore) -> None:
    with pytest.raises(StorageError):
        store.remove_tree("/")
    with pytest.raises(StorageError):
        store.rename("/", "/a")


def test_a_directory_is_not_moved_into_itself(store: KeeperStore, root: str) -> None:
    store.make_directory(f"{root}/a/b")
    with pytest.raises(StorageError) as caught:
        store.rename(f"{root}/a", f"{root}/a/b/c")

    assert caught.value.errno == errno.EINVAL
    assert store.kind(f"{root}/a/b") == "directory"


def test_a_second_name_takes_no_room(store: KeeperStore, root: str) -> None:
    place = _step(store, root, 2**20)
    before = store.status().kept_bytes
    store.share(f"{place}/file", f"{root}/second")
    assert store.status().kept_bytes == before
    store.remove_tree(place)
    assert store.read_file(f"{root}/second") == b"x" * 2**20


def _step(store: KeeperStore, root: str, nbytes: int, name: str = "built") -> str:
    """Build a directory with one data file; return where it is."""
    place = f"{root}/{name}"
    store.make_directory(place)
    with closing(store.create_data_file(f"{place}/file")) as file:
        file.write_at(0, [memoryview(b"x" * nbytes)])
        file.sync()

    return place


def test_pages_that_stay_mapped_hold_what_was_written_last(store: KeeperStore, root: str) -> None:
    nbytes = 3 * 2**20
    store.publish(store.begin_build(f"{root}/published", _step(store, root, nbytes)))
    before = store.status()
    for number in range(6):
        parts = [bytes([number, part]) * 2**19 for part in range(3)]
        with closing(store.create_data_file(f"{root}/file")) as file:
            file.allocate(nbytes)
            for part in (2, 0, 1):
                file.write_at(part * 2**20, [memoryview(parts[part])[:100], memoryview(parts[part])[100:]])

            file.sync()

        assert store.read_file(f"{root}/file") == b"".join(parts)
        store.remove_tree(f"{root}/file")

    after = store.status()
    assert after.reused_bytes - before.reused_bytes >= 5 * nbytes, "or this test shows nothing"
    assert after.lingering_bytes == before.lingering_bytes, (
        "a mapping that lasts keeps no pages from the pool"
    )


def test_pages_of_a_long_document_are_used_again(start: Start) -> None:
    document = b"x" * (MOST_DOCUMENT_BYTES + 1)
    with closing(start().store()) as store:
        for number in range(3):
            place = f"/{number}-built"
            store.make_directory(place)
            store.write_file(f"{place}/document", document)
            store.publish(store.begin_build(f"/{number}", place))
            store.remove_tree(f"/{number}")

        status = store.status()

    assert status.reused_bytes >= 2 * len(document)
    assert status.fresh_bytes < 2 * len(document)


def test_a_file_that_is_still_open_for_writing_is_not_used_again(store: KeeperStore, root: str) -> None:
    nbytes = 3 * 2**20
    store.publish(store.begin_build(f"{root}/published", _step(store, root, nbytes)))
    with closing(store.create_data_file(f"{root}/file")) as late:
        late.write_at(0, [memoryview(b"1" * nbytes)])
        late.sync()
        store.remove_tree(f"{root}/file")
        assert store.status().lingering_bytes >= nbytes
        with closing(store.create_data_file(f"{root}/other")) as file:
            file.write_at(0, [memoryview(b"2" * nbytes)])
            file.sync()
            late.write_at(0, [memoryview(b"3" * nbytes)])

    assert store.read_file(f"{root}/other") == b"2" * nbytes


def test_a_file_goes_by_a_socket_from_pages_into_pages(store: KeeperStore, root: str) -> None:
    data = os.urandom(3 * 2**20 + 5)
    with closing(store.create_data_file(f"{root}/source")) as file:
        file.write_at(0, [memoryview(data)])
        file.sync()

    here, there = socket.socketpair()
    with (
        here,
        there,
        closing(store.create_data_file(f"{root}/copy")) as copy,
        closing(SplicePipe(2**16)) as pipe,
    ):
        here.setblocking(False)
        there.setblocking(False)
        copy.allocate(len(data))
        with pytest.raises(BlockingIOError):
            copy.receive(there, pipe, 0, 1)

        with closing(store.open_data_file(f"{root}/source")) as source:
            sent = received = 0
            while received < len(data):
                with suppress(BlockingIOError):
                    sent += source.send(here, sent, 2**20) if sent < len(data) else 0

                received += copy.receive(there, pipe, received, 2**20)

            with pytest.raises(TruncatedDataError):
                source.send(here, sent, 1)

        here.close()
        assert copy.receive(there, pipe, received, 1) == 0
        copy.sync()

    assert store.read_file(f"{root}/copy") == data


def test_a_document_goes_by_a_socket_too(store: KeeperStore, root: str) -> None:
    store.write_file(f"{root}/document", b"0123456789")
    here, there = socket.socketpair()
    with here, there, closing(store.open_data_file(f"{root}/document")) as document:
        assert document.send(here, 2, 100) == 8
        assert there.recv(100) == b"23456789"
