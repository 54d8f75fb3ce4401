"""A bucket in memory does what every store does, and the sweep of a save leaves all of it or nothing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket

from penstock.errors import StorageError, TruncatedDataError
from penstock.handlers.stores.buckets.bucket_builds import MARK
from penstock.kernel import (
    Store,
)
from penstock.kernel.protocols import WholeWrites
from penstock.testing import LongFileConformance, SharingConformance, StoreConformance


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


class TestBucketStore(StoreConformance, SharingConformance, LongFileConformance):
    own_names = frozenset({MARK})

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def make_store(self) -> Store:
        return self.bucket.store()

    def root(self, tmp_path: Path) -> str:
        return URL


def test_a_bucket_store_says_what_it_can_do(bucket: Bucket) -> None:
    store = bucket.store()
    assert (store.directories, store.system_files, store.objects) == (None, None, store)


def test_what_is_built_is_seen_by_nobody_until_it_is_published(bucket: Bucket) -> None:
    store, other = bucket.store(), bucket.store()
    store.write_file(f"{URL}/run/6/file", b"")
    store.write_file(f"{URL}/run/6/{MARK}", b"by another library")
    token = store.begin_build(f"{URL}/run/7", f"{URL}/run/7.tmp")
    store.write_file(f"{token.place}/d/file", b"content")
    assert store.kind(token.place) == "directory"
    assert store.read_file(f"{token.place}/d/file") == b"content"
    assert other.list_folders(f"{URL}/run") == other.list_directory(f"{URL}/run") == ["6"]
    assert other.kind(f"{URL}/run/7") is None
    assert other.identity(f"{URL}/run/7") is None
    store.publish(token)
    assert other.list_folders(f"{URL}/run") == other.list_directory(f"{URL}/run") == ["6", "7"]
    assert other.kind(f"{URL}/run/7") == "directory"


def test_the_mark_is_put_last_and_says_what_the_save_wrote(bucket: Bucket) -> None:
    store = bucket.store()
    token = store.begin_build(f"{URL}/7", f"{URL}/7.tmp")
    store.write_file(f"{token.place}/{MARK}", b"written by the save\n")
    store.write_file(f"{token.place}/file", b"")
    assert bucket.objects_there() == ["7.penstock-saving", "7/file"]
    assert store.read_file(f"{token.place}/{MARK}") == b"written by the save\n"
    assert store.list_directory(token.place) == [MARK, "file"]
    before = store.identity(token.built)
    store.publish(token)
    assert bucket.objects_there() == [f"7/{MARK}", "7/file"]
    assert store.read_file(f"{URL}/7/{MARK}").startswith(b"written by the save\n")
    assert store.identity(f"{URL}/7") == before


def test_a_checkpoint_is_removed_mark_first(bucket: Bucket) -> None:
    store = bucket.store()
    token = store.begin_build(f"{URL}/7", f"{URL}/7.tmp")
    store.write_file(f"{token.place}/a", b"content")
    store.publish(token)
    reader = store.open_data_file(f"{URL}/7/a")
    store.remove_tree(f"{URL}/7")
    assert bucket.objects_there() == []
    with pytest.raises(StorageError):
        reader.read_at(0, [memoryview(bytearray(1))])


def test_a_data_file_grows_and_has_zeros_where_nothing_was_written(bucket: Bucket) -> None:
    store = bucket.store()
    file = store.create_data_file(f"{URL}/data")
    expected = np.zeros(3 * 2**20 + 7, np.uint8)
    for offset, nbytes in ((3 * 2**20, 7), (5, 10), (2**20, 2**20)):
        part = np.random.default_rng(offset).integers(0, 255, nbytes, np.uint8)
        expected[offset : offset + nbytes] = part
        file.write_at(offset, [part.data, memoryview(b"")])

    assert bucket.objects_there() == []  # nothing is there before all of it is
    file.sync()
    file.sync()
    assert store.read_file(f"{URL}/data") == expected.tobytes()
    with pytest.raises(StorageError, match="was closed"):
        file.write_at(0, [memoryview(b"late")])


def test_what_is_gathered_goes_back_to_the_system(bucket: Bucket) -> None:
    store = bucket.store()
    part = memoryview(bytes(2**20))
    tracemalloc.start()
    try:
        files = [store.create_data_file(f"{URL}/data"), store.create_long_file(f"{URL}/long", 2**23)]
        for file in files:
            file.allocate(2**22)
            for at in range(0, 2**22, 2**18):
                file.write_at(at, [part[: 2**18]])

        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held < 2**20, "the allocator keeps what threads free in turn"
    for file in files:
        file.close()


def test_a_whole_file_is_put_at_once_from_where_it_lies(bucket: Bucket) -> None:
    file = bucket.store().create_data_file(f"{URL}/data")
    assert isinstance(file, WholeWrites)
    file.allocate(4)
    file.write_whole(memoryview(b"data"))
    assert bucket.store().read_file(f"{URL}/data") == b"data"
    assert file.transfers.buffered_bytes == 0
    file.sync()
    begun = bucket.store().create_data_file(f"{URL}/other")
    begun.write_at(0, [memoryview(b"a")])
    for late in (file, begun):
        with pytest.raises(StorageError, match="has content already"):
            late.write_whole(memoryview(b"data"))


def test_a_file_that_became_shorter_is_truncated_data(bucket: Bucket) -> None:
    store = bucket.store()
    store.write_file(f"{URL}/data", b"0123456789")
    reader = store.open_data_file(f"{URL}/data")
    store.write_file(f"{URL}/data", b"01234")
    with pytest.raises(TruncatedDataError):
        reader.read_at(2, [memoryview(bytearray(6))])


def test_a_path_of_another_bucket_is_refused(bucket: Bucket) -> None:
    with pytest.raises(StorageError, match=r"is not in s3://bucket"):
        bucket.store().kind("s3://bucket-2/run")


@pytest.mark.parametrize("name", ["a b", "ü", "50%", "a+b", "~x", "[1]", "a=b&c"])
def test_names_with_odd_characters_are_found_again(bucket: Bucket, name: str) -> None:
    store = bucket.store()
    store.write_file(f"{URL}/run/{name}/file", b"content")
    assert store.list_folders(f"{URL}/run") == [name]
    assert store.kind(f"{URL}/run/{name}") == "directory"
    assert store.read_file(f"{URL}/run/{name}/file") == b"content"
    store.remove_tree(f"{URL}/run/{name}")
    assert bucket.objects_there() == []
