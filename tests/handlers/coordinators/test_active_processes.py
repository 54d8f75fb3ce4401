"""Some processes of a job agree, without the others. Each is a task with one service in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from penstock.config import JobLimits, JobOptions
from penstock.errors import ConfigError, InactiveProcessError, PeerSilentError, PlansDifferError
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.joint_operation import JointOperation
from penstock.testing import MemoryKeyValues

PATH = "/run/step_1"
COUNT = 5
LIMITS = JobLimits(join_s=50.0, silence_s=50.0, beat_s=5.0, call_s=5.0)
HASTY = JobLimits(join_s=0.4, silence_s=0.8, beat_s=0.2, call_s=20.0)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


class Job:
    """The processes of a job, and what each of them got."""

    def __init__(self, limits: JobLimits = LIMITS) -> None:
        self.service = MemoryKeyValues()
        self.limits = limits
        self.found: dict[int, object] = {}

    def coordinator(self, index: int, active: Sequence[int], prefix: str = "") -> JobCoordinator:
        options = JobOptions(active_processes=tuple(active), key_prefix=prefix)
        return JobCoordinator(self.service, index, COUNT, self.limits, options)

    async def take_part(
        self, index: int, active: Sequence[int], *, prefix: str = "", plan: str = "plan"
    ) -> None:
        """Do what a save does; note the parts that the primary got, or the place that the others heard."""
        operation = self.coordinator(index, active, prefix).operation(PATH)
        assert isinstance(operation, JointOperation)
        try:
            async with operation.running():
                await operation.compare(plan.encode(), lambda: [f"['x']\t{plan}"])
                if operation.is_primary:
                    await operation.begin(f"place of {index}")
                    parts = await operation.parts()
                    await operation.decide()
                    await operation.tell_published()
                    self.found[index] = dict(parts)
                    return

                place, _ = await operation.wait_begun(plan.encode(), lambda: [f"['x']\t{plan}"])
                await operation.bring(str(index).encode())
                await operation.wait_published()
                self.found[index] = place
        except Exception as error:
            self.found[index] = error


async def test_two_groups_do_one_thing_each_at_the_same_time_and_do_not_cross() -> None:
    job = Job()
    async with create_task_group() as tasks:
        for index in (1, 3):
            tasks.start_soon(job.take_part, index, (1, 3))
        for index in (0, 2, 4):
            tasks.start_soon(job.take_part, index, (4, 2, 0))

    assert job.found == {
        0: {2: b"2", 4: b"4"},
        1: {3: b"3"},
        2: "place of 0",
        3: "place of 1",
        4: "place of 0",
    }


async def test_one_group_does_two_things_at_one_path_under_different_prefixes() -> None:
    job, seen = Job(), dict[str, object]()

    async def both(prefix: str) -> None:
        each = Job()
        each.service = job.service
        async with create_task_group() as tasks:
            for index in (1, 3):
                tasks.start_soon(partial(each.take_part, index, (1, 3), prefix=prefix, plan=prefix))

        seen[prefix] = each.found

    async with create_task_group() as tasks:
        for prefix in ("train", "eval"):
            tasks.start_soon(both, prefix)

    assert seen == {prefix: {1: {3: b"3"}, 3: "place of 1"} for prefix in ("train", "eval")}


async def test_what_is_wrong_is_told_with_the_indices_of_the_job() -> None:
    job = Job()
    async with create_task_group() as tasks:
        tasks.start_soon(job.take_part, 2, (2, 3))
        tasks.start_soon(partial(job.take_part, 3, (2, 3), plan="another"))

    for index in (2, 3):
        error = job.found[index]
        assert isinstance(error, PlansDifferError)
        assert error.processes == (3,)
        assert error.differences == ("['x']: process 2 has plan, process 3 has another",)


@pytest.mark.parametrize(("here", "absent"), [(1, 4), (4, 1)])
async def test_only_those_who_take_part_are_waited_for(here: int, absent: int) -> None:
    job = Job(HASTY)
    await job.take_part(here, (1, 4))
    error = job.found[here]
    assert isinstance(error, PeerSilentError)
    assert error.processes == (absent,)


async def test_who_takes_no_part_is_refused() -> None:
    outsider = Job().coordinator(2, (1, 3))
    assert (outsider.process_index, outsider.is_primary) == (2, False)
    for ask in (outsider.operation, outsider.announcements):
        with pytest.raises(InactiveProcessError, match=r"process 2 takes no part: .* are 1, 3") as caught:
            ask(PATH)
        assert (caught.value.process, caught.value.active) == (2, (1, 3))


async def test_one_alone_agrees_with_nobody() -> None:
    alone = Job().coordinator(2, (2,))
    assert alone.is_primary
    assert alone.operation(PATH).is_alone
    assert alone.announcements(PATH) is None
    with pytest.raises(InactiveProcessError):
        Job().coordinator(0, (2,)).operation(PATH)


@pytest.mark.parametrize("active", [(), (1, 1), (-1,), (True,), ("0",)])
def test_what_names_no_processes_is_refused(active: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"job\.active_processes"):
        JobOptions(active_processes=active)


def test_a_process_that_the_job_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 is none of the job's, which are 0 to 4"):
        Job().coordinator(0, (0, 5))


@pytest.mark.parametrize(
    "lists",
    [
        {0: (0, 1, 2), 1: (0, 1), 2: (0, 1, 2)},
        {0: (0, 1), 1: (1, 2), 2: (1, 2)},
        {0: (0, 1), 1: tuple(range(COUNT))},
        {0: tuple(range(COUNT)), 1: (0, 1)},
    ],
    ids=["a worker", "two primaries", "a worker has all", "the others have all"],
)
async def test_different_lists_are_told_apart_by_all_who_are_here(lists: dict[int, tuple[int, ...]]) -> None:
    job = Job(JobLimits(join_s=50.0, silence_s=50.0, beat_s=0.02, call_s=20.0))
    async with create_task_group() as tasks:
        for index, active in lists.items():
            tasks.start_soon(job.take_part, index, active)
            while not any("/join/" in key for key in job.service.keys):  # two others could be done before it
                await checkpoint()

    for index in lists:
        error = job.found[index]
        assert isinstance(error, PlansDifferError), (index, error)
        (line,) = error.differences
        assert line.startswith("option active_processes: others have ")
        assert "process" in line
