"""Processes that ask for different things hear of it within some beats, and who asks for what."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
from anyio import Event, create_task_group
from anyio.lowlevel import checkpoint

from penstock.config import JobLimits
from penstock.errors import PlansDifferError
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.handlers.coordinators.joint_operation import JointOperation
from penstock.testing import MemoryKeyValues

COUNT = 3
LIMITS = JobLimits(join_s=500.0, write_s=500.0, silence_s=50.0, beat_s=0.05, call_s=20.0)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


class Job:
    """A job whose processes are tasks, and what each of them raised."""

    def __init__(self) -> None:
        service = MemoryKeyValues()
        self.coordinators = [JobCoordinator(service, index, COUNT, LIMITS) for index in range(COUNT)]
        self.raised: dict[int, BaseException] = {}
        self.saved: list[tuple[int, str]] = []

    async def save(self, index: int, path: str, begun: Event | None = None) -> None:
        operation = self.coordinators[index].operation(path)
        assert isinstance(operation, JointOperation)
        try:
            async with operation.running():
                await operation.compare(b"plan", list)
                if begun is not None:
                    begun.set()
                await self._publish(operation)
        except Exception as error:
            self.raised[index] = error
        else:
            self.saved.append((index, path))

    async def _publish(self, operation: JointOperation) -> None:
        if operation.is_primary:
            await operation.begin("/place")
            await operation.parts()
            await operation.decide()
            await operation.tell_published()
        else:
            await operation.wait_begun(b"plan", list)
            await operation.bring(b"")
            await operation.wait_published()

    def check(self, asked: Mapping[int, str]) -> None:
        """All have raised; each knows at least its own path and that of the primary, and nothing wrong."""
        assert set(self.raised) == set(range(COUNT))
        for index, error in self.raised.items():
            assert isinstance(error, PlansDifferError), error
            assert error.asked.items() <= asked.items()
            assert {error.asked[index], error.asked[0]} == {asked[index], asked[0]}
            assert len(set(error.asked.values())) > 1
            assert all(repr(path) in str(error) for path in error.asked.values())


@pytest.mark.parametrize(
    "asked",
    [
        {0: "/run/5", 1: "/run/5", 2: "/run/6"},
        {0: "/run/6", 1: "/run/5", 2: "/run/5"},
        {0: "/run/4", 1: "/run/5", 2: "/run/6"},
        {0: "steps in /run", 1: "steps in /run", 2: "steps in /other"},
        {0: "steps in /run", 1: "/run/5", 2: "/run/5"},
    ],
    ids=["another step", "the primary's step", "each another", "another root", "another kind"],
)
async def test_all_hear_who_asks_for_what(asked: Mapping[int, str]) -> None:
    job = Job()
    async with create_task_group() as tasks:
        for index, path in asked.items():
            tasks.start_soon(job.save, index, path)

    job.check(asked)


async def test_who_waits_for_a_decision_while_the_primary_saves_hears_of_it() -> None:
    job = Job()

    async def hear(index: int) -> None:
        announcements = job.coordinators[index].announcements("/run")
        assert announcements is not None
        try:
            await announcements.hear("save 6")
        except PlansDifferError as error:
            job.raised[index] = error

    async with create_task_group() as tasks:
        tasks.start_soon(job.save, 0, "/run/5")
        tasks.start_soon(job.save, 1, "/run/5")
        tasks.start_soon(hear, 2)

    job.check({0: "/run/5", 1: "/run/5", 2: "the decision 'save 6' about /run"})


async def test_who_is_ahead_and_who_is_behind_are_waited_for() -> None:
    """Process 1 has come to the one save and looks for the next; process 2 comes many looks later."""
    job, looks = Job(), Event()
    member = job.coordinators[1]

    async def ahead() -> None:
        async with create_task_group() as saves:
            saves.start_soon(job.save, 1, "/run/5")
            saves.start_soon(job.save, 1, "/run/6")
            while member.calls.get("under", 0) < 5:
                await checkpoint()
            looks.set()

    async def behind(index: int) -> None:
        await looks.wait()
        await job.save(index, "/run/5")
        await job.save(index, "/run/6")

    async def primary() -> None:
        await job.save(0, "/run/5")
        await job.save(0, "/run/6")

    async with create_task_group() as tasks:
        for work in (primary, ahead, partial(behind, 2)):
            tasks.start_soon(work)

    assert job.raised == {}
    assert sorted(job.saved) == [(index, path) for index in range(COUNT) for path in ("/run/5", "/run/6")]


async def test_after_different_operations_the_same_path_can_be_saved() -> None:
    job = Job()
    async with create_task_group() as tasks:
        for index, path in {0: "/run/5", 1: "/run/5", 2: "/run/6"}.items():
            tasks.start_soon(job.save, index, path)

    job.raised.clear()
    async with create_task_group() as tasks:
        for index in range(COUNT):
            tasks.start_soon(job.save, index, "/run/5")

    assert job.raised == {}
    assert len(job.saved) == COUNT
