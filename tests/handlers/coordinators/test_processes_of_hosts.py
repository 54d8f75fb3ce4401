"""How many processes of a job are in one place, over one service in memory."""

from __future__ import annotations

import pytest

from penstock.config import JobOptions
from penstock.handlers.coordinators.job_coordinator import JobCoordinator
from penstock.testing import MemoryKeyValues

pytestmark = pytest.mark.anyio


async def test_processes_in_one_place_are_counted_until_all_have_come() -> None:
    service = MemoryKeyValues()
    job = [JobCoordinator(service, index, 4) for index in range(4)]
    assert await job[0].count_neighbours("host a") == (1, False)
    assert await job[1].count_neighbours("host b") == (1, False)
    assert await job[2].count_neighbours("host a") == (2, False)
    assert await job[3].count_neighbours("host a") == (3, True)
    found = [await each.count_neighbours(moved_to) for each, moved_to in zip(job, "xyzz", strict=True)]
    assert found[-1] == (2, True)
    assert len(service.keys) == 4


async def test_a_process_that_takes_no_part_gets_its_share_of_memory() -> None:
    service, options = MemoryKeyValues(), JobOptions(active_processes=(0,))
    job = [JobCoordinator(service, index, 2, options=options) for index in range(2)]
    await job[0].count_neighbours("host")
    assert await job[1].count_neighbours("host") == (2, True)
    assert await job[0].count_neighbours("host") == (2, True)
