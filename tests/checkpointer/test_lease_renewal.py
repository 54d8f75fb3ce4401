"""The heartbeat: what is built and held is renewed while a Checkpointer is open, and no longer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import anyio
import numpy as np
import pytest
from anyio import Event, create_task_group, fail_after, from_thread
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket, Interposed, bucket_of_every_url

import penstock
from penstock.config import StoreOptions
from penstock.errors import ClaimLostError
from penstock.handlers.stores.buckets import BucketStore, ObjectClient, S3Options
from penstock.kernel import ObjectStore, StoreWrapper
from penstock.steps import CheckpointManager
from penstock.stores import StoreFinder
from penstock.testing import FaultyStore, MemoryStore

pytestmark = pytest.mark.anyio

LEASE_S = 0.03
BEATS = 4


class Beating(StoreWrapper):
    """A store that counts its renewals."""

    @property
    def objects(self) -> ObjectStore:
        return self

    @property
    def lease_s(self) -> float:
        return LEASE_S

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.n_beats, self.enough = 0, Event()

    def renew_leases(self) -> None:
        self.n_beats += 1
        if self.n_beats == BEATS:
            from_thread.run_sync(self.enough.set)


async def test_leases_are_renewed_while_the_body_runs_and_no_longer() -> None:
    store = Beating()
    finder = StoreFinder(store, StoreOptions())
    async with create_task_group() as tasks:
        with fail_after(30), finder.renewing_leases(tasks):
            await store.enough.wait()

    n_beats = store.n_beats
    await anyio.sleep(LEASE_S)  # nothing happens in it
    assert store.n_beats == n_beats


def counted(bucket: Bucket, enough: Event) -> BucketStore:
    """Return a store of short leases, which says when a claim was swapped often enough."""
    swapped = list[str]()

    def swap(method: Callable[..., Any], key: str, *arguments: Any) -> Any:
        done = method(key, *arguments)
        swapped.append(key)
        if len(swapped) == BEATS:
            from_thread.run_sync(enough.set)

        return done

    client = cast("ObjectClient", Interposed(bucket.client(), {"swap": swap}))
    return BucketStore(URL, lambda _: None, lease_s=LEASE_S, objects=client)


async def test_a_save_that_takes_long_keeps_its_claim() -> None:
    bucket, enough = Bucket(), Event()
    store = FaultyStore(counted(bucket, enough))
    hang = store.hang_on("data.sync")
    async with penstock.Checkpointer(store=store) as checkpointer:
        save = await checkpointer.save(f"{URL}/7", {"a": np.ones(3)})
        await hang.wait_reached()
        with fail_after(30):
            await enough.wait()

        hang.release()
        await save

    assert not [key for key in bucket.objects_there() if "penstock-saving" in key]


async def test_a_save_whose_claim_was_taken_fails_and_says_so() -> None:
    bucket, enough = Bucket(), Event()
    store = FaultyStore(counted(bucket, enough))
    hang = store.hang_on("data.sync")
    async with penstock.Checkpointer(store=store) as checkpointer:
        save = await checkpointer.save(f"{URL}/7", {"a": np.ones(3)})
        await hang.wait_reached()
        bucket.end_owner("7.penstock-saving", id="another token")
        hang.release()
        with pytest.raises(ClaimLostError, match="took its claim over"):
            await save


async def test_a_manager_keeps_its_root_between_saves() -> None:
    bucket, enough = Bucket(), Event()
    async with CheckpointManager(f"{URL}/run", store=counted(bucket, enough)) as manager:
        with fail_after(30):
            await enough.wait()

        assert manager.latest_step() is None


def test_a_manager_of_orbax_keeps_its_root_between_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no event loop of its own then."""
    bucket = bucket_of_every_url(monkeypatch)
    monkeypatch.setenv("PENSTOCK_STORE__S3__LEASE_S", str(LEASE_S))
    ocp: Any = importlib.import_module("penstock.orbax")
    with ocp.CheckpointManager(f"{URL}/run") as manager:
        manager.save(1, args=ocp.args.StandardSave({"a": np.ones(3)}))
        manager.wait_until_finished()
        client, key = bucket.client(), "run/.penstock-writer.penstock-saving"
        seen = set[bytes]()
        while len(seen) < BEATS:
            found = client.read(key)
            assert found is not None
            seen.add(found[0])

    assert client.read(key) is None
    assert S3Options().lease_s == 90.0
