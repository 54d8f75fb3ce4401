"""Saves and restores of a bucket in memory: the budget, what is refused, cancellation, steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, Interposed

from penstock import Checkpointer
from penstock.config import StoreOptions
from penstock.errors import (
    DestinationExistsError,
    NotACheckpointError,
    PathError,
    SaveCancelledError,
    SpecError,
    StepExistsError,
    UnsupportedByStoreError,
)
from penstock.handlers import LocalStore
from penstock.handlers.formats.orbax import digest_in_mark
from penstock.handlers.stores.buckets import MARK, AzOptions, BucketStore, GsOptions, S3Options
from penstock.kernel.registry import SHORTEST_LEASE_S
from penstock.steps import CheckpointManager, KeepLast
from penstock.stores import StoreFinder
from penstock.testing import FaultyStore

AssertSame = Callable[[Any, Any], None]

pytestmark = pytest.mark.anyio

PATH = f"{URL}/run/7"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def state(step: int = 1) -> dict[str, Any]:
    return {"w": jnp.arange(300_000.0) * step, "b": np.full(3, step), "name": "run", "step": step}


async def test_a_tree_is_saved_described_verified_and_restored(
    bucket: Bucket, assert_same: AssertSame
) -> None:
    async with Checkpointer(store=FaultyStore(bucket.store())) as checkpointer:
        report = await (await checkpointer.save(PATH, state()))
        assert report.n_leaves == 4
        assert_same(await checkpointer.restore(PATH, like=state(2)), state())
        assert len((await checkpointer.metadata(PATH)).leaves) == 4
        assert (await checkpointer.verify(PATH)).intact
        mark = bucket.store().read_file(f"{PATH}/{MARK}")
        assert digest_in_mark(mark) is not None, "the digest of the record is still in it"
        with pytest.raises(DestinationExistsError, match='exists; overwrite="delete-first" deletes'):
            await (await checkpointer.save(PATH, state(2)))
        with pytest.raises(UnsupportedByStoreError, match='Directories; overwrite="delete-first" deletes'):
            await (await checkpointer.save(PATH, state(2), overwrite=True))

        assert checkpointer.statistics().leased == 0

    assert not [key for key in bucket.objects_there() if "penstock-saving" in key]


async def test_the_lengths_of_many_files_are_asked_for_at_once(
    bucket: Bucket, assert_same: AssertSame
) -> None:
    asked = Interposed(bucket.client())
    store = BucketStore(URL, lambda _: None, file_bytes=2**16, objects=cast("Any", asked))
    tree = {f"w{at}": np.full(2**13, at, np.float64) for at in range(12)}
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(PATH, tree))
        files = [key for key in bucket.objects_there() if key.startswith("run/7/d/")]
        assert len(files) > 8
        asked.calls.clear()
        assert_same(await checkpointer.restore(PATH), tree)

    heads = [key for method, key in asked.calls if method == "head" and "/d/" in key]
    assert len(heads) < 2 * len(files), "one for each that is opened"


async def test_what_is_there_is_deleted_first_if_that_is_asked_for(bucket: Bucket, tmp_path: Path) -> None:
    store = FaultyStore(bucket.store())
    async with Checkpointer(store=store) as checkpointer:
        for step in (1, 2):  # the first time there is nothing to delete
            await (await checkpointer.save(PATH, state(step), overwrite="delete-first"))

        names = [each.name for each in store.operations if each.path == PATH]
        assert [name for name in names if name in {"begin_build", "remove_tree", "publish"}] == [
            "begin_build",
            "remove_tree",
            "begin_build",
        ]
        assert (await checkpointer.restore(PATH))["step"] == 2
        with pytest.raises(SpecError, match="overwrite must be"):
            await checkpointer.save(PATH, state(3), overwrite=cast("Any", "delete"))

    bucket.client().put("run/8/other", b"no checkpoint")
    async with Checkpointer(store=bucket.store()) as checkpointer:
        with pytest.raises(PathError, match="only checkpoints are overwritten"):
            await (await checkpointer.save(f"{URL}/run/8", state(), overwrite="delete-first"))

    async with Checkpointer() as checkpointer:  # a disk replaces in one step
        for step in (1, 2):
            await (await checkpointer.save(tmp_path / "7", state(step), overwrite="delete-first"))

        assert (await checkpointer.restore(tmp_path / "7"))["step"] == 2


async def test_a_file_is_put_as_soon_as_it_is_full(bucket: Bucket) -> None:
    store = FaultyStore(bucket.store(file_bytes=2**20))
    tree = [np.full(2**18, n, np.float32) for n in range(24)]  # a file each
    async with Checkpointer(store=store) as checkpointer:
        await (await checkpointer.save(PATH, tree))

    held = most = 0
    for operation in store.operations:
        held += {"create_data_file": 1, "data.sync": -1}.get(operation.name, 0)
        most = max(most, held)

    assert most <= 8 + 1, "one for each request, and the last"
    assert len(bucket.store().list_directory(f"{PATH}/d")) >= 24


async def test_a_chunk_that_fills_a_file_is_not_gathered_first(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with Checkpointer(store=bucket.store(file_bytes=2**20)) as checkpointer:
        await (await checkpointer.save(PATH, {"large": np.ones(2**17)}))
        assert (await checkpointer.restore(PATH))["large"].sum() == 2**17

    (written,) = [record.getMessage() for record in caplog.records if "data.written" in record.getMessage()]
    assert f"direct_bytes={2**20}" in written


@pytest.mark.parametrize("at", ["begin_build", "data.sync", "write_file"])
async def test_a_cancelled_save_leaves_nothing(bucket: Bucket, at: str) -> None:
    store = FaultyStore(bucket.store())
    hang = store.hang_on(at)
    async with Checkpointer(store=store) as checkpointer:
        save = await checkpointer.save(PATH, state())
        await hang.wait_reached()
        assert bucket.store().kind(PATH) is None
        save.cancel()
        hang.release()
        with pytest.raises(SaveCancelledError):
            await save

        assert checkpointer.statistics().leased == 0

    assert bucket.objects_there() == []


async def test_a_checkpoint_that_another_saver_published_meanwhile_is_not_touched(bucket: Bucket) -> None:
    store = FaultyStore(bucket.store())
    hang = store.hang_on("begin_build")
    async with Checkpointer(store=store) as slow, Checkpointer(store=bucket.store()) as quick:
        save = await slow.save(PATH, state(1))
        await hang.wait_reached()
        await (await quick.save(PATH, state(2)))
        hang.release()
        with pytest.raises(DestinationExistsError):
            await save

        assert (await quick.restore(PATH))["step"] == 2


async def test_steps_are_saved_listed_and_deleted(bucket: Bucket) -> None:
    async with CheckpointManager(f"{URL}/run", keep=KeepLast(1), store=bucket.store()) as manager:
        for step in (1, 2):
            save = await manager.save(step, state(step))
            assert save is not None
            await save

        await manager.wait()
        assert list(manager.all_steps()) == [2]
        assert (await manager.restore())["step"] == 2
        with pytest.raises(StepExistsError, match='exists; overwrite="delete-first" deletes'):
            await manager.save(2, state(2), force=True)

    bucket.builds().begin("run/3", "place", None)
    bucket.end_owner("run/3.penstock-saving")
    async with CheckpointManager(f"{URL}/run", store=bucket.store()):
        assert not [key for key in bucket.objects_there() if key.startswith("run/3")], "cleaned up"

    assert bucket.store().list_folders(f"{URL}/run") == ["2"]


async def test_a_whole_bucket_may_hold_steps_and_is_looked_at(bucket: Bucket) -> None:
    async with Checkpointer(store=bucket.store()) as checkpointer:
        with pytest.raises(NotACheckpointError):
            await checkpointer.restore(URL)

        for step in (1, 2):
            await (await checkpointer.save(f"{URL}/{step}", state(step)))

        assert (await checkpointer.restore(URL))["step"] == 2
        assert len((await checkpointer.metadata(URL)).leaves) == 4
        report = await checkpointer.verify(URL)
        assert (report.intact, report.checkpoints) == (True, (f"{URL}/1", f"{URL}/2"))
        with pytest.raises(PathError, match="is a whole bucket"):
            await checkpointer.save(URL, state(), overwrite="delete-first")


async def test_a_step_that_is_being_saved_is_none(bucket: Bucket) -> None:
    store = FaultyStore(bucket.store())
    hang = store.hang_on("publish")
    async with Checkpointer(store=store) as checkpointer, Checkpointer(store=bucket.store()) as reader:
        await (await reader.save(f"{URL}/run/6", state(6)))
        save = await checkpointer.save(PATH, state(7))
        await hang.wait_reached()
        with pytest.raises(NotACheckpointError, match="does not exist"):
            await reader.restore(PATH)

        assert (await reader.restore(f"{URL}/run"))["step"] == 6
        hang.release()
        await save
        assert (await reader.restore(f"{URL}/run"))["step"] == 7


def test_each_path_has_its_store() -> None:
    finder = StoreFinder(None, StoreOptions())
    assert isinstance(finder.at("/run"), LocalStore)
    found = finder.at("s3://bucket/run")
    assert isinstance(found, BucketStore)
    assert found is finder.at("s3://bucket/other")
    assert found is not finder.at("s3://bucket-2/run")
    given = LocalStore()
    assert StoreFinder(given, StoreOptions()).at("s3://bucket/run") is given


def test_leases_of_other_schemes_are_renewed_although_ours_last_long() -> None:
    ours = StoreOptions(s3=S3Options(lease_s=600.0), gs=GsOptions(lease_s=600.0), az=AzOptions(lease_s=600.0))
    assert StoreFinder(None, ours).shortest_lease_s == SHORTEST_LEASE_S
    assert StoreFinder(None, StoreOptions(s3=S3Options(lease_s=9.0))).shortest_lease_s == 9.0


async def test_a_base_in_another_store_is_refused(tmp_path: Any) -> None:
    async with Checkpointer() as checkpointer:
        with pytest.raises(SpecError, match="not in the store"):
            await checkpointer.save("s3://bucket/run/7", state(), base=tmp_path / "6")
