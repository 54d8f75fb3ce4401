"""The protocol of a commit: what each step does when another saver, a dead one or a failure is in its way."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from tests.handlers.stores.buckets.bucket_rig import Bucket, Interposed

from penstock.errors import (
    AccessDeniedError,
    ClaimLostError,
    InUseError,
    OutcomeUnknownError,
    StorageError,
    ThrottledError,
    UnsupportedByStoreError,
)
from penstock.handlers.stores.buckets.bucket_builds import MARK, Build, Builds

CLAIM = "7.penstock-saving"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def begun(builds: Builds) -> Build:
    build = builds.begin("7", "place", None)
    assert builds.create(build, "7/file", b"content") == "created"
    return build


def test_of_two_savers_one_is_told_who_the_other_is(bucket: Bucket) -> None:
    first, second = bucket.builds(), bucket.builds()
    build = begun(first)
    with pytest.raises(
        InUseError, match=r"claimed by process \d+ of .*, renewed \d+ s ago; unless .* ends in \d+ s"
    ):
        second.begin("7", "place", None)

    first.publish(build)
    with pytest.raises(StorageError) as caught:
        second.begin("7", "place", None)

    assert caught.value.errno == errno.EEXIST
    assert bucket.objects_there() == [f"7/{MARK}", "7/file"]


def test_what_a_dead_saver_left_is_removed_by_the_next(bucket: Bucket) -> None:
    begun(bucket.builds())
    bucket.end_owner(CLAIM)
    builds = bucket.builds()
    build = builds.begin("7", "place", None)
    assert bucket.objects_there() == [CLAIM]
    assert builds.create(build, "7/other", b"") == "created"
    builds.publish(build)
    assert bucket.objects_there() == [f"7/{MARK}", "7/other"]


def test_what_a_dead_saver_was_about_to_publish_is_published(bucket: Bucket) -> None:
    client = Interposed(bucket.client())

    def die(method: Any, key: str, data: bytes) -> Any:
        if key.endswith(MARK):
            raise KeyboardInterrupt
        return method(key, data)

    client.instead["create"] = die
    dead = client.builds()
    with pytest.raises(KeyboardInterrupt):
        dead.publish(begun(dead))

    assert bucket.objects_there() == [CLAIM, "7/file"]
    bucket.end_owner(CLAIM)
    with pytest.raises(StorageError) as caught:
        bucket.builds().begin("7", "place", None)

    assert caught.value.errno == errno.EEXIST
    assert bucket.objects_there() == [f"7/{MARK}", "7/file"]


def test_a_saver_whose_claim_was_taken_publishes_nothing_and_removes_nothing(bucket: Bucket) -> None:
    slow = bucket.builds()
    build = begun(slow)
    bucket.end_owner(CLAIM)  # so it looks to the next one
    builds = bucket.builds()
    taken = begun(builds)
    with pytest.raises(ClaimLostError, match=r"process \d+ of .* took its claim over"):
        slow.publish(build)

    slow.discard(build)
    assert bucket.objects_there() == [CLAIM, "7/file"]
    builds.publish(taken)
    assert bucket.objects_there() == [f"7/{MARK}", "7/file"]


def test_a_failed_save_removes_what_it_wrote(bucket: Bucket) -> None:
    builds = bucket.builds()
    builds.discard(begun(builds))
    assert bucket.objects_there() == []
    assert builds.live == {}


def test_an_object_that_may_be_anothers_stays_hidden_until_the_next_save(bucket: Bucket) -> None:
    builds = bucket.builds()
    build = begun(builds)
    bucket.client().put("7/same", b"same")
    assert builds.create(build, "7/same", b"same") == "same"
    builds.discard(build)
    assert bucket.objects_there() == [CLAIM, "7/same"]
    assert bucket.store().kind("s3://bucket/7") is None
    builds.publish(begun(builds))
    assert bucket.objects_there() == [f"7/{MARK}", "7/file"]


def test_a_refused_mark_undoes_the_save(bucket: Bucket) -> None:
    client = Interposed(bucket.client())

    def refuse(method: Any, key: str, data: bytes) -> Any:
        if key.endswith(MARK):
            raise AccessDeniedError("create", key, "denied")
        return method(key, data)

    client.instead["create"] = refuse
    builds = client.builds()
    build = begun(builds)
    with pytest.raises(AccessDeniedError):
        builds.publish(build)

    builds.discard(build)
    assert bucket.objects_there() == []


def test_a_mark_of_unknown_fate_is_put_by_the_next_save(bucket: Bucket) -> None:
    client = Interposed(bucket.client())

    def lose(method: Any, key: str, data: bytes) -> Any:
        if key.endswith(MARK):
            raise ThrottledError("create", key, "503")
        return method(key, data)

    client.instead["create"] = lose
    builds = client.builds()
    build = begun(builds)
    with pytest.raises(OutcomeUnknownError, match="its mark could not be put"):
        builds.publish(build)

    builds.discard(build)
    assert bucket.objects_there() == [CLAIM, "7/file"]  # whole, and not seen yet
    client.instead.clear()
    with pytest.raises(StorageError, match="is there already"):
        builds.begin("7", "place", None)

    assert bucket.objects_there() == [f"7/{MARK}", "7/file"]


def test_a_removal_that_died_is_finished_by_the_next(bucket: Bucket) -> None:
    builds = bucket.builds()
    builds.publish(begun(builds))
    client = Interposed(bucket.client())

    def die(method: Any, keys: list[str]) -> Any:
        if keys and not keys[0].endswith(MARK):
            raise KeyboardInterrupt
        return method(keys)

    client.instead["delete"] = die
    with pytest.raises(KeyboardInterrupt):
        client.builds().remove("7")

    assert bucket.objects_there() == [CLAIM, "7/file"]
    assert bucket.store().kind("s3://bucket/7") is None
    builds.remove("7")
    assert bucket.objects_there() == []


def test_nothing_is_removed_under_a_save(bucket: Bucket) -> None:
    build = begun(bucket.builds())
    with pytest.raises(InUseError):
        bucket.builds().remove("7")

    assert bucket.objects_there() == [CLAIM, "7/file"]
    assert build.phase == "building"


def test_a_server_that_ignores_conditions_is_refused_before_anything_is_written(bucket: Bucket) -> None:
    client = Interposed(bucket.client())
    client.instead["keeps_conditions"] = lambda _method, _key, _data: False
    with pytest.raises(UnsupportedByStoreError, match="ConditionalWrites"):
        client.builds().begin("7", "place", None)

    assert bucket.objects_there() == []


def test_conditions_are_tried_once(bucket: Bucket) -> None:
    client = Interposed(bucket.client())
    builds = client.builds()
    builds.publish(begun(builds))
    builds.discard(builds.begin("8", "other place", None))
    assert [name for name, _ in client.calls].count("keeps_conditions") == 1


@pytest.mark.parametrize(
    "content", [b"", b"not JSON", b"[]", b'{"id": "1", "purpose": "sleeping", "mark": ""}']
)
def test_a_claim_that_cannot_be_read_holds(bucket: Bucket, content: bytes) -> None:
    bucket.client().put(CLAIM, content)
    with pytest.raises(InUseError, match="unknown process"):
        bucket.builds().begin("7", "place", None)


def test_a_lost_reply_is_no_conflict(bucket: Bucket) -> None:
    client = bucket.client()
    assert client.create("key", b"mine") == "created"
    assert client.create("key", b"mine") == "same"
    assert client.create("key", b"other") == "other"
    tag = client.head("key")
    assert tag is not None
    assert tag.tag is not None
    first = client.swap("key", b"second", tag.tag)
    assert first is not None
    assert client.swap("key", b"second", tag.tag) == first  # the same content: its reply was lost
    assert client.swap("key", b"third", tag.tag) is None
    assert client.swap("absent", b"", tag.tag) is None
