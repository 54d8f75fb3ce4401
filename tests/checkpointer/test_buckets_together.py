"""Several processes save to a bucket together; here they are tasks, with one service and one bucket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from anyio import create_task_group
from tests.handlers.stores.buckets.bucket_rig import URL, Bucket

from penstock import Checkpointer, PerProcess
from penstock.config import JobLimits
from penstock.errors import OutcomeUnknownError, PeerFailedError, PenstockError, StorageError
from penstock.handlers.coordinators import JobCoordinator
from penstock.handlers.stores.buckets import MARK
from penstock.testing import FaultyStore, MemoryKeyValues

pytestmark = pytest.mark.anyio

LIMITS = JobLimits(join_s=30.0, write_s=30.0, silence_s=30.0, beat_s=0.2, call_s=5.0)
COUNT = 3
PATH = f"{URL}/run/7"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


class Job:
    """A Checkpointer for each process, with a store of its own."""

    def __init__(self, bucket: Bucket) -> None:
        self.stores = [FaultyStore(bucket.store()) for _ in range(COUNT)]
        self.checkpointers: list[Checkpointer] = []

    async def save(self, path: str, n_leaves: int = 3, **options: Any) -> list[Any]:
        """Save in all of them; return the report of each, or its error."""

        async def one(index: int) -> Any:
            try:
                return await (await self.checkpointers[index].save(path, tree(index, n_leaves), **options))
            except PenstockError as error:
                return error

        return await each(one)


async def each(do: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """Do something in each process at once; return what came of it."""
    found: list[Any] = [None] * COUNT

    async def one(index: int) -> None:
        found[index] = await do(index)

    async with create_task_group() as tasks:
        for index in range(COUNT):
            tasks.start_soon(one, index)

    return found


@asynccontextmanager
async def job(bucket: Bucket) -> AsyncGenerator[Job]:
    service, made = MemoryKeyValues(), Job(bucket)
    async with AsyncExitStack() as ends:
        for index, store in enumerate(made.stores):
            coordinator = JobCoordinator(service, index, COUNT, LIMITS)
            opened = Checkpointer(store=store, coordinator=coordinator)
            made.checkpointers.append(await ends.enter_async_context(opened))

        yield made
        assert [one.statistics().leased for one in made.checkpointers] == [0] * COUNT
        assert [store.open_files for store in made.stores] == [0] * COUNT


def tree(index: int, n_leaves: int = 3) -> dict[str, Any]:
    own = {f"leaf {at}": np.full(9, index * 100 + at) for at in range(n_leaves)}
    return {"shared": np.arange(1000.0), "own": PerProcess(own)}


async def test_each_puts_its_own_objects_and_all_restore_them(bucket: Bucket) -> None:
    """What a process tells of many leaves goes by an object of its own, which is removed."""
    async with job(bucket) as made:
        for path, n_leaves in ((PATH, 3), (f"{URL}/run/8", 300)):
            reports = await made.save(path, n_leaves)
            assert {report.n_leaves for report in reports} == {1 + n_leaves}, reports

            async def restored(index: int, path: str = path, n_leaves: int = n_leaves) -> bool:
                like = tree(index, n_leaves)
                found = await made.checkpointers[index].restore(path, like=like)
                assert (found["shared"] == like["shared"]).all()
                return all((found["own"].value[name] == x).all() for name, x in like["own"].value.items())

            assert await each(restored) == [True] * COUNT
            assert (await made.checkpointers[0].verify(path)).intact

        marks = [
            [each.path for each in store.operations if each.name == "write_file" and each.path.endswith(MARK)]
            for store in made.stores
        ]
        assert [len(found) for found in marks] == [2, 0, 0], "the primary puts the mark"

    there = bucket.objects_there()
    for index in range(COUNT):
        assert [key for key in there if key.startswith(f"run/7/ocdbt.process_{index}/d/")]
    assert not [key for key in there if "penstock-saving" in key or "_PENSTOCK_PARTS" in key]


@pytest.mark.parametrize(
    ("operation", "who"),
    [
        ("begin_shared_build", 0),
        ("join_build", COUNT - 1),
        ("data.sync", 0),
        ("data.sync", COUNT - 1),
    ],
)
async def test_a_failure_publishes_nothing_and_the_next_save_goes_on(
    bucket: Bucket, operation: str, who: int
) -> None:
    async with job(bucket) as made:
        made.stores[who].fail_on(operation)
        errors = await made.save(PATH)
        assert isinstance(errors[who], StorageError)
        for index, error in enumerate(errors):
            if index != who:
                assert isinstance(error, PeerFailedError)
                assert list(error.processes) == [who]

        assert bucket.store().kind(PATH) is None
        assert {key for key in bucket.objects_there() if "/7" in key} <= {"run/7.penstock-saving"}
        reports = await made.save(PATH)
        assert (await made.checkpointers[0].verify(PATH)).intact, reports

    assert "run/7.penstock-saving" not in bucket.objects_there()


async def test_an_unknown_outcome_is_raised_by_all_processes(bucket: Bucket) -> None:
    async with job(bucket) as made:
        made.stores[0].fail_on("publish", error=OutcomeUnknownError(PATH, "its mark could not be put"))
        for error in await made.save(PATH):
            assert isinstance(error, OutcomeUnknownError)
            assert error.reason == "its mark could not be put"


async def test_what_a_failed_save_left_is_collected(bucket: Bucket) -> None:
    async with job(bucket) as made:
        made.stores[1].fail_on("data.sync")
        await made.save(PATH)
        assert bucket.objects_there() == ["run/7.penstock-saving"]
        left = bucket.store().collect(f"{URL}/run")

    assert left == {PATH: "removed"}
    assert bucket.objects_there() == []


async def test_two_jobs_save_to_one_path_and_one_wins(bucket: Bucket) -> None:
    async with job(bucket) as one, job(bucket) as other:
        ended: list[list[Any]] = []

        async def save(made: Job) -> None:
            ended.append(await made.save(PATH))

        async with create_task_group() as tasks:
            tasks.start_soon(save, one)
            tasks.start_soon(save, other)

        failed = [errors for errors in ended if isinstance(errors[0], PenstockError)]
        assert len(failed) == 1, ended
        assert all(isinstance(error, PenstockError) for error in failed[0])
        assert (await one.checkpointers[0].verify(PATH)).intact
