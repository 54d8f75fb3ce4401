"""In a bucket only what has its mark is a step; and what could not be restored never has a step deleted."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, bucket_of_every_url
from tests.own_files import REPORTS, listed

import penstock
from penstock.embedding import find_place
from penstock.errors import DestinationExistsError, IncompleteCheckpointError, InUseError, NotACheckpointError
from penstock.handlers.stores.buckets import MARK
from penstock.inspection.step_listing import list_checkpoints
from penstock.steps import CheckpointManager, KeepEvery, KeepLast

pytestmark = pytest.mark.anyio

ROOT = f"{URL}/run"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def state(step: int) -> dict[str, Any]:
    return {"a": np.full(100, float(step)), "step": step}


async def save(manager: CheckpointManager, step: int) -> None:
    future = await manager.save(step, state(step))
    assert future is not None
    await future


async def filled(bucket: Bucket) -> None:
    """Save the steps 0 to 3, and leave 4 to 7 without a mark, and a root of another run named like a step."""
    async with CheckpointManager(ROOT, store=bucket.store()) as manager:
        for step in range(4):
            await save(manager, step)

    client = bucket.client()
    whole = list(client.walk("run/3"))
    for key in whole:
        data = client.read(key)
        assert data is not None
        client.put(key.replace("run/3/", "run/other_9/12/"), data[0])
        if key == f"run/3/{MARK}":
            continue

        client.put(key.replace("run/3/", "run/4/"), data[0])  # a copy whose last object is missing
        client.put(key.replace("run/3/", "run/6/"), data[0])
        if "METADATA" in key:
            client.put(key.replace("run/3/", "run/5/"), data[0])  # a copy that had just begun

    client.put(f"run/other_9/{REPORTS}", b"{}")
    builds = bucket.builds()
    build = builds.begin("run/7", "place", None)
    for key in whole:
        data = client.read(key)
        if data is not None and key != f"run/3/{MARK}":
            builds.create(build, key.replace("run/3/", "run/7/"), data[0])

    client.delete(["run/7.penstock-saving"])  # as somebody may do by hand when the process was killed
    client.put("run/8/notes.txt", b"junk")


UNMARKED = ("4", "5", "6", "7", "8")


async def test_what_has_no_mark_is_no_step_for_anybody(bucket: Bucket) -> None:
    await filled(bucket)
    store = bucket.store()
    async with CheckpointManager(ROOT, store=store, read_only=True) as manager:
        assert list(manager.all_steps()) == [0, 1, 2, 3]
        assert manager.latest_step() == 3
        assert (await manager.restore())["step"] == 3
        seen = [step async for step in manager.watch(after=1, timeout_s=0)]
        assert seen == [2, 3]

    async with penstock.Checkpointer(store=store) as checkpointer:
        assert (await checkpointer.restore(ROOT))["step"] == 3
        assert (await checkpointer.restore(f"{ROOT}/3", item="default"))["step"] == 3
        assert (await checkpointer.restore(f"{ROOT}/3/default"))["step"] == 3
        for name in UNMARKED[:-1]:
            with pytest.raises(IncompleteCheckpointError, match=f"has no {MARK}"):
                await checkpointer.restore(f"{ROOT}/{name}")
            with pytest.raises((IncompleteCheckpointError, NotACheckpointError)):
                await checkpointer.metadata(f"{ROOT}/{name}")
            with pytest.raises(NotACheckpointError):
                await penstock.delete(f"{ROOT}/{name}", store=store)
            with pytest.raises((IncompleteCheckpointError, NotACheckpointError)):
                await checkpointer.restore(f"{ROOT}/{name}/default")
            report = await checkpointer.verify(f"{ROOT}/{name}")
            assert report.leftovers == (f"{ROOT}/{name}",)

        with pytest.raises(NotACheckpointError):
            await checkpointer.restore(f"{ROOT}/8")


async def test_lists_show_an_unmarked_step_apart(bucket: Bucket) -> None:
    await filled(bucket)
    store = bucket.store()
    listed = {facts.name: facts.state for facts in list_checkpoints(store, find_place(store, ROOT))}
    assert {name: listed[name] for name in ("0", "3")} == {"0": "finished", "3": "finished"}
    assert {listed[name] for name in UNMARKED} == {"interrupted"}
    assert "other_9" not in listed, "it is a run, in which reports of its saves are kept"
    report = await penstock.gc(ROOT, store=store)
    assert report.unmarked == tuple(f"{ROOT}/{name}" for name in UNMARKED)
    assert report.removed == ()
    one = await penstock.gc(f"{ROOT}/5", store=store)
    assert one.unmarked == (f"{ROOT}/5",)
    assert (await penstock.gc(f"{ROOT}/3", store=store)).unmarked == ()


async def test_an_unmarked_step_is_removed_when_asked_for_and_nothing_else_is(bucket: Bucket) -> None:
    await filled(bucket)
    before = [key for key in bucket.objects_there() if key.split("/")[1] not in UNMARKED]
    report = await penstock.gc(ROOT, unmarked=True, store=bucket.store())
    assert report.removed == tuple(f"{ROOT}/{name}" for name in UNMARKED)
    assert bucket.objects_there() == before
    async with CheckpointManager(ROOT, store=bucket.store()) as manager:
        await save(manager, 5)


async def test_retention_counts_no_step_without_a_mark_and_deletes_none(bucket: Bucket) -> None:
    await filled(bucket)
    junk = [key for key in bucket.objects_there() if key.split("/")[1] in (*UNMARKED, "other_9")]
    async with CheckpointManager(ROOT, keep=KeepLast(2) | KeepEvery(3), store=bucket.store()) as manager:
        await save(manager, 9)
        await manager.wait()
        assert list(manager.all_steps()) == [0, 3, 9]

    assert [key for key in bucket.objects_there() if key.split("/")[1] in (*UNMARKED, "other_9")] == junk


async def test_a_save_to_an_unmarked_step_is_refused_with_what_is_there(bucket: Bucket) -> None:
    await filled(bucket)
    async with CheckpointManager(ROOT, store=bucket.store()) as manager:
        with pytest.raises(DestinationExistsError, match=f"no {MARK}.*gc --unmarked"):
            await save(manager, 5)


async def test_a_mark_with_nothing_is_counted_by_no_policy(bucket: Bucket) -> None:
    """A copy in which the mark came first, or what a saver that woke too late put there."""
    await filled(bucket)
    bucket.client().put(f"run/20/{MARK}", b"")
    async with CheckpointManager(ROOT, keep=KeepLast(2), store=bucket.store()) as manager:
        await save(manager, 30)
        await manager.wait()
        assert list(manager.all_steps()) == [3, 20, 30]


async def test_on_a_disk_what_only_looks_like_a_step_has_none_deleted(tmp_path: Path) -> None:
    async with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            await save(manager, step)

    shutil.copytree(tmp_path / "3", tmp_path / "5")
    for name in ("_CHECKPOINT_METADATA", MARK):
        (tmp_path / "5" / name).unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "5/default")
    (tmp_path / "6").mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "7/notes.txt").write_text("junk")
    async with CheckpointManager(tmp_path, keep=KeepLast(2)) as manager:
        await save(manager, 9)
        await manager.wait()
        assert {3, 9} <= set(manager.all_steps())

    assert listed(tmp_path) == ["3", "5", "6", "7", "9"]


def test_orbax_managers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_of_every_url(monkeypatch)
    anyio.run(filled, bucket)
    ocp: Any = importlib.import_module("penstock.orbax")
    junk = [key for key in bucket.objects_there() if key.split("/")[1] in UNMARKED]
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(ROOT, options=options) as manager:
        assert list(manager.all_steps()) == [0, 1, 2, 3]
        assert manager.latest_step() == 3
        manager.save(9, args=ocp.args.StandardSave(state(9)))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [3, 9]

    assert [key for key in bucket.objects_there() if key.split("/")[1] in UNMARKED] == junk


class TestHolds:
    async def test_a_second_manager_is_refused_and_told_when_that_ends(self, bucket: Bucket) -> None:
        async with CheckpointManager(ROOT, store=bucket.store()) as manager:
            await save(manager, 1)
            with pytest.raises(penstock.errors.RootInUseError, match=r"renewed \d+ s ago.* ends in \d+ s"):
                await CheckpointManager(ROOT, store=bucket.store()).__aenter__()

            await save(manager, 2)

        async with CheckpointManager(ROOT, store=bucket.store()) as manager:
            assert manager.latest_step() == 2

        assert not [key for key in bucket.objects_there() if "penstock" in key]

    async def test_the_root_of_a_process_of_another_machine_opens_when_its_lease_is_over(
        self, bucket: Bucket
    ) -> None:
        far = bucket.builds()
        far.claims.lease_s = 0.001
        far.hold("run/.penstock-writer")
        bucket.end_owner("run/.penstock-writer.penstock-saving", boot="b", machine="m", namespace="n")
        async with CheckpointManager(ROOT, store=bucket.store()) as manager:
            await save(manager, 1)

    async def test_a_manager_that_lost_its_root_saves_and_deletes_nothing(self, bucket: Bucket) -> None:
        first = CheckpointManager(ROOT, keep=KeepLast(1), store=bucket.store())
        async with first:
            await save(first, 1)
            bucket.client().put("run/.penstock-writer.penstock-saving", b"taken over")
            store: Any = first.checkpointer.engine.at(ROOT).store
            store.renew_leases()  # the heartbeat
            with pytest.raises(penstock.errors.ClaimLostError):
                await save(first, 2)
            with pytest.raises(penstock.errors.ClaimLostError):
                await first.delete(1)

        assert f"run/1/{MARK}" in bucket.objects_there()
        with pytest.raises((InUseError, penstock.errors.RootInUseError)):
            await CheckpointManager(ROOT, store=bucket.store()).__aenter__()
