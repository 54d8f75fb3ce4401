"""What one list and a few reads tell of a checkpoint, and when that is not believed."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, Interposed

from penstock.errors import StorageError
from penstock.handlers.stores.buckets.bucket_builds import MARK
from penstock.handlers.stores.buckets.bucket_store import BucketStore
from penstock.handlers.stores.buckets.snapshots import BucketSnapshot

PATH = f"{URL}/run/7"
DATA = bytes(range(200))


@pytest.fixture
def bucket() -> Bucket:
    made = Bucket()
    fill(made, b"first")
    return made


def fill(bucket: Bucket, what: bytes) -> None:
    client = bucket.client()
    client.put("run/7/_METADATA", what)
    client.put("run/7/d/0", DATA)
    client.put("run/7/item/_METADATA", what * 2)
    client.put("run/7.penstock-saving", b"of another")
    client.put(f"run/7/{MARK}", b"mark of " + what)


def counting(bucket: Bucket) -> tuple[BucketStore, Interposed]:
    asked = Interposed(bucket.client())
    objects: Any = asked  # it does all that a client does
    return BucketStore(URL, lambda _: None, objects=objects), asked


def settled(store: BucketStore) -> BucketSnapshot:
    found = store.snapshot(PATH)
    assert found is not None
    for read in found.reads():
        read()

    assert found.settle() is None
    return found


def test_a_snapshot_answers_as_the_store_does_and_asks_nothing(bucket: Bucket) -> None:
    store, asked = counting(bucket)
    found = settled(store)
    n_asked = len(asked.calls)
    paths = [PATH, *[f"{PATH}/{name}" for name in ("_METADATA", "d", "d/0", "item", "item/_METADATA", MARK)]]
    answers = [(found.kind(path), path in paths) for path in paths]
    listed = [found.list_directory(path) for path in (PATH, f"{PATH}/d", f"{PATH}/item")]
    read = [found.read_file(f"{PATH}/{name}") for name in ("_METADATA", "item/_METADATA", MARK)]
    sizes = found.file_sizes([f"{PATH}/d/0", f"{PATH}/d"])
    assert found.kind(f"{PATH}/absent") is None
    assert found.identity(PATH) == found.identity_now() == b"mark of first"
    assert len(asked.calls) == n_asked

    assert answers == [(store.kind(path), True) for path in paths]
    assert listed == [store.list_directory(path) for path in (PATH, f"{PATH}/d", f"{PATH}/item")]
    assert read == [b"first", b"firstfirst", b"mark of first"]
    assert sizes == [len(DATA), -1]


def test_nothing_that_was_replaced_while_it_was_read_is_settled(bucket: Bucket) -> None:
    store = bucket.store()
    found = store.snapshot(PATH)
    assert found is not None
    for read in found.reads():
        read()

    fill(bucket, b"other")
    following = found.settle()
    assert following is not None
    for read in following.reads():
        read()

    assert following.settle() is None
    assert following.read_file(f"{PATH}/_METADATA") == b"other"


def test_what_is_gone_is_not_settled(bucket: Bucket) -> None:
    found = bucket.store().snapshot(PATH)
    assert found is not None
    bucket.client().delete([f"run/7/{MARK}"])
    with pytest.raises(StorageError) as caught:
        found.settle()

    assert caught.value.errno == errno.ENOENT


def test_a_directory_without_a_mark_has_no_snapshot(bucket: Bucket) -> None:
    assert bucket.store().snapshot(f"{URL}/run") is None
    assert bucket.store().snapshot(f"{URL}/absent") is None
    assert bucket.store().snapshot(URL) is None


def test_the_mark_is_read_again_only_if_anything_was_read_after_it(bucket: Bucket) -> None:
    store, asked = counting(bucket)
    found = settled(store)
    fill(bucket, b"other")
    assert found.identity_now() == b"mark of first", "all was read while it was so"
    file = found.open_data_file(f"{PATH}/d/0")
    buffer = bytearray(10)
    file.read_at(3, [memoryview(buffer)])
    assert (bytes(buffer), found.identity_now()) == (DATA[3:13], b"mark of first")

    file.read_at(3, [memoryview(buffer)])  # a second look: perhaps it was damaged on its way
    assert asked.calls[-1] == ("read_range", "run/7/d/0")
    assert found.identity_now() == b"mark of other"


def test_a_snapshot_is_sent_to_another_process_whole(bucket: Bucket) -> None:
    first = settled(bucket.store())
    store, asked = counting(bucket)
    found = store.shared_snapshot(PATH, first.encoded())
    assert found is not None
    assert found.is_current()
    assert found.list_directory(PATH) == first.list_directory(PATH)
    assert found.read_file(f"{PATH}/_METADATA") == b"first"
    assert found.identity_now() == b"mark of first"
    assert len(asked.calls) == 1

    fill(bucket, b"other")
    later = store.shared_snapshot(PATH, first.encoded())
    assert later is not None
    assert not later.is_current()


@pytest.mark.parametrize("encoded", [b"", b"nonsense"])
def test_what_cannot_be_read_is_not_believed(bucket: Bucket, encoded: bytes) -> None:
    assert bucket.store().shared_snapshot(PATH, encoded) is None


def test_an_object_that_is_not_listed_is_asked_for(bucket: Bucket) -> None:
    found = settled(bucket.store())
    bucket.client().put("run/7/d/late", b"late")
    assert found.size(f"{PATH}/d/late") == 4
    assert found.read_file(f"{PATH}/d/late") == b"late"
    assert found.file_sizes([f"{PATH}/d/late", f"{PATH}/d/never"]) == [4, None]
    with pytest.raises(StorageError):
        found.read_file(f"{PATH}/d/never")
