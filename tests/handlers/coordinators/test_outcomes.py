"""What is left in the service of operations that failed, one Checkpointer after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from anyio import create_task_group, sleep_forever
from tests.handlers.coordinators.test_joint_operation import LONG, Processes

from penstock.errors import PeerFailedError, StorageError
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.joint_operation import JointOperation
from penstock.handlers.coordinators.procedures import MOST_KEPT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

N_FAILURES = 3 * MOST_KEPT


async def fail(operation: JointOperation) -> None:
    raise StorageError("write", operation.path, "Input/output error")


async def wait(operation: JointOperation) -> None:
    await sleep_forever()  # until it is ended


async def keys_left(job: Processes, path_of: Callable[[int], str], came: int) -> list[int]:
    """Return how many keys there are after each of many failures, to which only the first processes come."""
    left: list[int] = []
    for number in range(N_FAILURES):
        job.coordinators = [JobCoordinator(view, at, 3, LONG) for at, view in enumerate(job.views)]
        await job.take_part(0, path_of(number), fail)
        for index in range(1, came):
            await job.take_part(index, path_of(number), wait)

        left.append(len(job.service.keys))

    return left


@pytest.mark.parametrize("came", [1, 2])
async def test_after_many_failures_no_more_is_left_than_after_a_few(came: int) -> None:
    job = Processes(3)
    left = await keys_left(job, "/run/step_{}".format, came)

    assert set(left[MOST_KEPT:]) == {left[MOST_KEPT]}
    assert left[0] < left[MOST_KEPT] <= MOST_KEPT * (left[0] - 1) + 1


async def test_after_many_failures_of_one_path_one_says_what_to_join() -> None:
    job = Processes(3)
    await keys_left(job, lambda _: "/run/step_1", 2)

    assert len([key for key in job.service.keys if "/join/" in key]) == 1


async def test_who_comes_late_hears_of_the_last_failures_although_all_is_closed() -> None:
    job = Processes(3)
    await keys_left(job, "/run/step_{}".format, 2)
    for number in range(N_FAILURES - MOST_KEPT, N_FAILURES):
        await job.take_part(2, f"/run/step_{number}", wait)
        error = job.errors.pop(2)
        assert isinstance(error, PeerFailedError)
        assert error.processes == (0,)


async def test_what_another_one_forgets_takes_nothing_from_a_save_to_that_path() -> None:
    """The first failed in a Checkpointer that is closed, and others forget it while the next save goes on."""
    job = Processes(2)
    await job.take_part(0, "/run/step_1", fail)

    async def save(operation: JointOperation) -> None:
        for number in range(MOST_KEPT):
            job.coordinators[0] = JobCoordinator(job.views[0], 0, 2, LONG)
            await job.take_part(0, f"/run/other_{number}", fail)

        job.errors.clear()
        tasks.start_soon(job.take_part, 1, "/run/step_1", job.save)
        await job.save(operation)

    job.coordinators[0] = JobCoordinator(job.views[0], 0, 2, LONG)
    async with create_task_group() as tasks:
        tasks.start_soon(job.take_part, 0, "/run/step_1", save)

    assert job.errors == {}
    assert job.published == [b"part"]
