"""A build in a bucket that several processes write into: one claims and publishes, the others join."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, Interposed

from penstock.errors import ClaimLostError, InUseError, StorageError
from penstock.handlers.stores.buckets.bucket_builds import MARK, Builds
from penstock.handlers.stores.buckets.bucket_claims import Claims
from penstock.handlers.stores.buckets.bucket_store import BucketStore
from penstock.handlers.stores.buckets.object_client import ObjectClient
from penstock.handlers.stores.publishing import Workspace
from penstock.kernel import Threads

pytestmark = pytest.mark.anyio

FINAL = f"{URL}/run/7"
CLAIM = "run/7.penstock-saving"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


class Process:
    """A process of a job, with a store of its own."""

    def __init__(self, bucket: Bucket) -> None:
        self.store: BucketStore = bucket.store()

    async def begins(self, name: str = "a") -> Workspace:
        workspace = Workspace(self.store, Threads(), FINAL, f"{FINAL}.tmp", overwrite=False)
        workspace.build_below(name)
        await workspace.open()
        return workspace

    async def joins(self, primary: Workspace) -> Workspace:
        workspace = Workspace(self.store, Threads(), FINAL, "", overwrite=False, joins=True)
        await workspace.enter(primary.path(""))
        return workspace

    def writes(self, workspace: Workspace, name: str, data: bytes = b"1") -> None:
        file = self.store.create_data_file(workspace.path(name))
        file.write_at(0, [memoryview(data)])
        file.sync()
        file.close()


async def test_what_all_have_built_is_published_and_nothing_else_is_left(bucket: Bucket) -> None:
    first, second = Process(bucket), Process(bucket)
    primary = await first.begins()
    other = await second.joins(primary)
    await other.open("ocdbt.process_1/d")
    second.writes(other, "ocdbt.process_1/d/x")
    second.store.write_file(other.path("parts/1"), b"part")
    assert first.store.read_file(primary.path("parts/1")) == b"part"
    first.store.remove_tree(primary.path("parts"))
    first.store.write_file(primary.path(MARK), b"mark")
    assert Process(bucket).store.kind(FINAL) is None, "until it is published"
    await primary.publish()
    await other.publish()
    other.release()
    primary.release()
    assert other.identity == primary.identity == second.store.identity(FINAL)
    assert bucket.objects_there() == [f"run/7/{MARK}", "run/7/ocdbt.process_1/d/x"]


async def test_what_all_wrote_goes_and_what_comes_late_is_hidden(bucket: Bucket) -> None:
    first, second = Process(bucket), Process(bucket)
    primary = await first.begins()
    other = await second.joins(primary)
    second.writes(other, "x")
    await primary.discard()
    primary.release()
    assert bucket.objects_there() == [CLAIM]
    with pytest.raises(StorageError, match="the save was ended"):
        await other.open("ocdbt.process_1/d")

    second.writes(other, "late")  # it was stopped behind the look at the place
    other.release()
    assert Process(bucket).store.kind(FINAL) is None
    third = Process(bucket)  # alive all of them, and yet nobody waits
    again = await third.begins("b")
    assert bucket.objects_there() == [CLAIM]
    await again.publish()
    assert bucket.objects_there() == [f"run/7/{MARK}"]


async def test_what_is_taken_back_cannot_be_published_and_the_path_is_free(bucket: Bucket) -> None:
    first, second, third = Process(bucket), Process(bucket), Process(bucket)
    stopped = await first.begins()
    first.writes(stopped, "x")
    others = [await second.joins(stopped), await third.joins(stopped)]
    with pytest.raises(InUseError):
        await Process(bucket).begins()

    assert [await other.take_back() for other in others] == [True, True]
    again = await second.begins("b")
    second.writes(again, "new")
    with pytest.raises(StorageError, match="the save was ended"):
        await stopped.open("d")
    with pytest.raises(ClaimLostError, match="took its claim over"):
        await stopped.publish()
    await stopped.discard()
    stopped.release()
    await again.publish()
    assert bucket.objects_there() == [f"run/7/{MARK}", "run/7/new"]


async def test_what_was_published_or_is_about_to_be_is_not_taken_back(bucket: Bucket) -> None:
    first, second = Process(bucket), Process(bucket)
    primary = await first.begins()
    other = await second.joins(primary)
    await primary.publish()
    assert not await other.take_back()
    again = bucket.store().begin_build(f"{URL}/run/8", f"{URL}/run/8.tmp")
    strange = Workspace(second.store, Threads(), f"{URL}/run/8", "", overwrite=False, joins=True)
    await strange.enter(f"{again.place}/another token")
    assert not await strange.take_back()


def interposed(bucket: Bucket, at: str, then: Callable[[], object]) -> ObjectClient:
    """Return a client that does something once, before its first request of a kind."""
    waiting = [then]

    def first(method: Callable[..., object], *arguments: object) -> object:
        if waiting:
            waiting.pop()()
        return method(*arguments)

    return cast("ObjectClient", Interposed(bucket.client(), {at: first}))


async def test_of_two_swaps_the_first_decides(bucket: Bucket) -> None:
    first = Process(bucket)
    primary = await first.begins()
    client = interposed(bucket, "swap", primary.publish_now)  # between the look at the claim and its swap
    builds = Builds(client, Claims(client, "a store"))
    assert not builds.take_back(builds.join("run/7", primary.path("")))
    assert first.store.kind(FINAL) == "directory"
    assert bucket.objects_there() == [f"run/7/{MARK}"]


async def test_what_is_about_to_be_published_is_not_taken_back(bucket: Bucket) -> None:
    primary = await Process(bucket).begins()
    taken, builds = list[bool](), bucket.builds()
    build = builds.join("run/7", primary.path(""))

    def look(method: Callable[[str, bytes], object], key: str, data: bytes) -> object:
        if key.endswith(MARK):
            taken.append(builds.take_back(build))
        return method(key, data)

    client = Interposed(bucket.client(), {"create": look})
    primary._store._builds._client = client  # type: ignore[attr-defined]
    await primary.publish()
    assert taken == [False]
    assert bucket.objects_there() == [f"run/7/{MARK}"]


async def test_who_has_left_knows_the_place_no_more(bucket: Bucket) -> None:
    primary, process = await Process(bucket).begins(), Process(bucket)
    other = await process.joins(primary)
    assert process.store.kind(primary.path("")) == "directory"
    for _ in range(2):
        other.release()
    assert process.store.kind(primary.path("")) is None
    await primary.discard()


async def test_a_server_that_does_not_answer_gives_nothing_back(bucket: Bucket) -> None:
    def fail() -> None:
        raise StorageError("get", FINAL, "no answer")

    primary = await Process(bucket).begins()
    other = await Process(bucket).joins(primary)
    client = interposed(bucket, "read", fail)
    other._store._builds._client = client  # type: ignore[attr-defined]
    assert not await other.take_back()
    assert await other.take_back()
