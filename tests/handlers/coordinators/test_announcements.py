"""What the primary decides and the others hear, over one service in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from penstock.config import JobLimits
from penstock.errors import PeerFailedError, PeerSilentError
from penstock.handlers.coordinators.job_coordinator import MOST_KEYS, JobAnnouncements, JobCoordinator
from penstock.testing import MemoryKeyValues

LIMITS = JobLimits(join_s=20.0, silence_s=20.0, beat_s=0.05, call_s=5.0)
NAMES = [f"save {step}" for step in range(30)]

pytestmark = pytest.mark.anyio


class Members:
    """The announcements of each process about one thing."""

    def __init__(self, count: int, limits: JobLimits = LIMITS) -> None:
        self.service = MemoryKeyValues()
        self.coordinators = [JobCoordinator(self.service, at, count, limits) for at in range(count)]
        self.heard: dict[int, list[str]] = {}

    def new(self) -> list[JobAnnouncements]:
        found = [coordinator.announcements("/run") for coordinator in self.coordinators]
        return [each for each in found if each is not None]

    async def hear(self, index: int, one: JobAnnouncements, names: Sequence[str]) -> None:
        self.heard[index] = [await one.hear(name) for name in names]


async def tell(primary: JobAnnouncements, names: Sequence[str]) -> None:
    for name in names:
        await primary.tell(name, f"{name}!")


@pytest.mark.parametrize("count", [2, 5])
async def test_all_hear_what_the_primary_tells_and_few_keys_are_left(count: int) -> None:
    members = Members(count)
    primary, *others = members.new()
    async with create_task_group() as tasks:
        for index, one in enumerate(others):
            tasks.start_soon(members.hear, index, one, NAMES)

        tasks.start_soon(tell, primary, NAMES)

    assert members.heard == {index: [f"{name}!" for name in NAMES] for index in range(count - 1)}
    assert len([key for key in members.service.keys if "/said/" in key]) == MOST_KEYS
    for one in (primary, *others):
        await one.leave()
    assert members.service.keys == []


async def test_who_is_far_behind_hears_everything_in_order() -> None:
    members = Members(2)
    primary, other = members.new()
    await tell(primary, NAMES)
    await members.hear(0, other, NAMES)

    assert members.heard == {0: [f"{name}!" for name in NAMES]}


async def test_who_is_behind_hears_what_was_told_before_the_primary_left() -> None:
    members = Members(3)
    primary, one, other = members.new()
    await primary.tell("save 1", "yes")
    await members.hear(0, one, ["save 1"])
    await members.hear(1, other, ["save 1"])
    await primary.tell("save 2", "no")
    await primary.leave()
    await members.hear(0, one, ["save 2"])
    await one.leave()
    await members.hear(1, other, ["save 2"])
    await other.leave()

    assert members.heard == {0: ["no"], 1: ["no"]}
    assert members.service.keys == []


async def test_waiting_for_a_primary_that_has_left_is_an_error() -> None:
    members = Members(3)
    primary, *others = members.new()
    await primary.tell("save 1", "yes")
    for index, each in enumerate(others):
        await members.hear(index, each, ["save 1"])

    await primary.leave()
    for each in others:
        with pytest.raises(PeerFailedError) as caught:
            await each.hear("save 2")

        assert caught.value.processes == (0,)
        assert "decides nothing more" in str(caught.value)
        await each.leave()


async def test_what_is_asked_again_is_told_again() -> None:
    members = Members(2)
    primary, other = members.new()
    for answer in ("0", "1", "0"):
        await primary.tell("save 3", answer)

    assert [await other.hear("save 3") for _ in range(3)] == ["0", "1", "0"]


async def test_the_primary_takes_what_was_asked_once() -> None:
    members = Members(3)
    primary, one, other = members.new()
    await primary.tell("x", "")
    assert not await primary.take("preempted")
    for each in (one, other):
        await each.ask("preempted")

    assert [await primary.take("preempted") for _ in range(2)] == [True, False]


@pytest.mark.parametrize("came", [0, 1, 2])
async def test_what_an_earlier_one_was_told_is_not_taken_for_now(came: int) -> None:
    """Those that took part in it wait for the next one; the others find it, and leave it for the next one."""
    members = Members(3)
    primary, *others = members.new()
    await primary.tell("save 1", "old")
    for one in others[:came]:
        await one.hear("save 1")
        await one.leave()

    await primary.leave()
    primary, *others = members.new()
    async with create_task_group() as tasks:
        for index, each in enumerate(others):
            tasks.start_soon(members.hear, index, each, ["save 2"])

        for _ in range(20):
            await checkpoint()

        await primary.tell("save 2", "new")

    assert members.heard == {0: ["new"], 1: ["new"]}
    for each in (primary, *others):
        await each.leave()
    assert members.service.keys == []


async def test_a_primary_that_says_nothing_is_named() -> None:
    members = Members(2, JobLimits(join_s=0.2, silence_s=0.2, beat_s=0.05, call_s=5.0))
    _, other = members.new()
    with pytest.raises(PeerSilentError) as caught:
        await other.hear("save 1")

    assert caught.value.processes == (0,)


async def test_nothing_is_sent_before_the_first_call() -> None:
    members = Members(2)
    for one in members.new():
        await one.leave()

    assert members.service.keys == []
