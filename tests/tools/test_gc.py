"""`penstock.gc`: what ended processes left is found and removed, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, Interposed

import penstock
from penstock.errors import NotACheckpointError, ThrottledError
from penstock.handlers.formats.orbax import TEMPORARY_SUFFIX
from penstock.handlers.stores.buckets import MARK, Builds
from penstock.testing import FaultyStore

pytestmark = pytest.mark.anyio

CLAIM = "run/7.penstock-saving"
ANOTHER_MACHINE = {"boot": "another", "machine": "another", "namespace": "another"}


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def begun(bucket: Bucket) -> Builds:
    builds = bucket.builds()
    build = builds.begin("run/7", "place", None)
    assert builds.create(build, "run/7/file", b"content") == "created"
    return builds


async def test_on_a_disk_what_no_process_holds_is_removed(tmp_path: Path) -> None:
    await penstock.save(tmp_path / "run/6", {"a": np.ones(3)})
    left = [f"7{TEMPORARY_SUFFIX}", f"deleted_5{TEMPORARY_SUFFIX}"]
    for name in left:
        (tmp_path / "run" / name / "d").mkdir(parents=True)

    (tmp_path / "run/7").mkdir()
    one = await penstock.gc(tmp_path / "run/7")
    assert one.removed == (str(tmp_path / "run" / left[0]),)
    (tmp_path / "run" / left[0]).mkdir()
    report = await penstock.gc(tmp_path / "run")
    assert report.removed == tuple(str(tmp_path / "run" / name) for name in left)
    assert (report.published, report.kept) == ((), ())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["6", "7"]
    assert (await penstock.gc(tmp_path / "run")).removed == ()
    with pytest.raises(NotACheckpointError):
        await penstock.gc(tmp_path / "none")


async def test_on_a_disk_a_save_that_goes_on_is_kept(tmp_path: Path) -> None:
    from penstock.handlers import LocalStore

    store = FaultyStore(LocalStore())
    hang = store.hang_on("data.sync")
    async with penstock.Checkpointer(store=store) as checkpointer:
        save = await checkpointer.save(tmp_path / "7", {"a": np.ones(3)})
        await hang.wait_reached()
        report = await penstock.gc(tmp_path)
        assert [Path(path).name for path in report.kept] == [f"7{TEMPORARY_SUFFIX}"]
        hang.release()
        await save

    assert (await penstock.restore(tmp_path / "7"))["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("at", ["run", "run/7"])
async def test_in_a_bucket_what_an_ended_process_left_is_removed(bucket: Bucket, at: str) -> None:
    async with penstock.Checkpointer(store=bucket.store()) as checkpointer:
        await (await checkpointer.save(f"{URL}/run/6", {"a": np.ones(3)}))

    whole = bucket.objects_there()
    begun(bucket)
    kept = await penstock.gc(f"{URL}/{at}", store=bucket.store())
    assert kept.kept == (f"{URL}/run/7",), "this process is alive"
    bucket.end_owner(CLAIM)
    report = await penstock.gc(f"{URL}/{at}", store=bucket.store())
    assert report.removed == (f"{URL}/run/7",)
    assert bucket.objects_there() == whole


async def test_what_was_whole_but_for_its_mark_is_published(bucket: Bucket) -> None:
    client = Interposed(bucket.client())

    def lose(method: object, key: str, data: bytes) -> object:
        raise ThrottledError("create", key, "503") if key.endswith(MARK) else KeyError

    builds = client.builds()
    build = builds.begin("run/7", "place", None)
    client.instead["create"] = lose
    with pytest.raises(penstock.PenstockError):
        builds.publish(build)

    bucket.end_owner(CLAIM)
    report = await penstock.gc(f"{URL}/run", store=bucket.store())
    assert report.published == (f"{URL}/run/7",)
    assert bucket.objects_there() == [f"run/7/{MARK}"]


async def test_a_process_of_another_machine_has_ended_when_its_claim_is_old_enough(bucket: Bucket) -> None:
    begun(bucket)
    bucket.end_owner(CLAIM, **ANOTHER_MACHINE)
    for older_than_s, kept in ((None, True), (60.0, True), (0.0, False)):
        report = await penstock.gc(f"{URL}/run", older_than_s=older_than_s, store=bucket.store())
        assert bool(report.kept) is kept

    assert bucket.objects_there() == []


async def test_age_says_nothing_of_a_process_that_is_seen_to_live(bucket: Bucket) -> None:
    begun(bucket)
    report = await penstock.gc(f"{URL}/run", older_than_s=0.0, store=bucket.store())
    assert report.kept == (f"{URL}/run/7",)
    assert json.loads(bucket.client().read(CLAIM)[0])["purpose"] == "saving"  # type: ignore[index]
