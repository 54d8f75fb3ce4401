from __future__ import annotations

from dataclasses import replace

import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from penstock.embedding import ByteAccount
from penstock.kernel import Span, StageStatistics, bottleneck
from penstock.kernel.memory import MemoryWaits, waiting_for_memory
from penstock.kernel.pipeline.statistics import StageMeter, combined, waited_for_memory_s

IDLE = StageStatistics("idle", 1, 0, 0, 0, 0.0, 0.0, 0.0)


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_bottleneck_is_the_stage_whose_workers_were_busiest() -> None:
    one = replace(IDLE, name="one", workers=1, n_in=1, busy_s=2.0)
    four = replace(IDLE, name="four", workers=4, n_in=1, busy_s=6.0)

    assert bottleneck([one, four]) == "one"
    assert bottleneck([one, replace(four, workers=2)]) == "four"
    assert bottleneck([]) is None
    assert bottleneck([IDLE, IDLE]) is None


def test_a_meter_adds_up() -> None:
    meter = StageMeter("write", 2)
    meter.took(10, 0.5)
    meter.took(20, 0.25)
    meter.passed(0.125)
    meter.passed(0.125)
    meter.passed(0.0)
    with meter.working(1, 10):
        pass
    with pytest.raises(ValueError, match="boom"), meter.working(0):
        raise ValueError("boom")

    statistics = meter.statistics()

    assert (statistics.name, statistics.workers) == ("write", 2)
    assert (statistics.n_in, statistics.n_out, statistics.nbytes) == (2, 3, 30)
    assert (statistics.starved_s, statistics.blocked_s) == (0.75, 0.25)
    assert [(span.worker, span.nbytes) for span in statistics.spans] == [(1, 10), (0, 0)]
    assert statistics.busy_s == sum(span.end - span.start for span in statistics.spans)
    assert statistics.busy_s > 0


def test_a_snapshot_does_not_change_afterwards_and_its_record_is_bounded() -> None:
    meter = StageMeter("write", 1)
    before = meter.statistics()
    for _ in range(StageMeter.MAX_SPANS + 10):
        with meter.working(0):
            pass

    assert before.spans == ()
    assert len(meter.statistics().spans) == StageMeter.MAX_SPANS


@pytest.mark.anyio
async def test_waiting_for_memory_is_no_work() -> None:
    clock, account = Clock(), ByteAccount(10)
    meter = StageMeter("device_to_host", 1, clock)
    held = await account.acquire(10)

    async def stretch() -> None:
        with meter.working(0, 5):
            clock.now += 1  # at work
            lease = await account.acquire(5)
            clock.now += 2
            lease.release()

    async with create_task_group() as tasks:
        tasks.start_soon(stretch)
        while not account.statistics().tasks_waiting:
            await checkpoint()

        clock.now += 30  # while it waits
        held.release()

    found = meter.statistics()
    assert (found.busy_s, found.memory_wait_s) == (3, 30)
    assert [(span.end - span.start, span.memory_wait_s) for span in found.spans] == [(33, 30)]
    assert found.busiest_s == 3


@pytest.mark.anyio
async def test_tasks_that_a_stage_starts_wait_for_it_and_count_once() -> None:
    clock, account = Clock(), ByteAccount(10)
    meter = StageMeter("mine", 1, clock)
    held = await account.acquire(10)

    async def lease_some() -> None:
        (await account.acquire(2)).release()

    async def stretch() -> None:
        with meter.working(0):
            async with create_task_group() as children:
                children.start_soon(lease_some)
                children.start_soon(lease_some)

    async with create_task_group() as tasks:
        tasks.start_soon(stretch)
        while account.statistics().tasks_waiting < 2:
            await checkpoint()

        clock.now += 7
        held.release()

    assert (meter.statistics().busy_s, meter.statistics().memory_wait_s) == (0, 7)


@pytest.mark.anyio
async def test_a_wait_that_goes_on_after_the_stretch_counts_as_far_as_the_stretch() -> None:
    clock, account = Clock(), ByteAccount(10)
    meter = StageMeter("mine", 1, clock)
    held = await account.acquire(10)

    async def lease_some() -> None:
        (await account.acquire(2)).release()

    async with create_task_group() as tasks:
        with meter.working(0):
            tasks.start_soon(lease_some)
            while not account.statistics().tasks_waiting:
                await checkpoint()

            clock.now += 2

        clock.now += 40
        held.release()

    assert (meter.statistics().busy_s, meter.statistics().memory_wait_s) == (0, 2)


def test_waits_of_nobody_are_not_counted() -> None:
    clock = Clock()
    waits, meter = MemoryWaits(clock), StageMeter("mine", 1, clock)
    with meter.working(0):
        pass
    with waiting_for_memory():
        clock.now += 5

    assert (waits.waited_s, meter.statistics().memory_wait_s) == (0, 0)


def test_waits_for_memory_are_summed() -> None:
    assert waited_for_memory_s([IDLE, replace(IDLE, memory_wait_s=2.0)]) == 2.0


def test_a_meter_tells_how_many_messages_waited() -> None:
    meter = StageMeter("write", 1)
    for queued in (0, 5, 1):
        meter.took(1, 0.0, queued)

    assert (meter.statistics().queued_mean, meter.statistics().queued_most) == (2.0, 5)
    assert (StageMeter("idle", 1).statistics().queued_mean) == 0


def test_figures_of_several_runs_are_added_by_name() -> None:
    span = Span(0, 1.0, 2.0, 5)
    one = StageStatistics("write", 2, 1, 1, 5, 1.0, 0.5, 0.25, 0.125, (span,), 4.0, 4)
    other = StageStatistics("write", 1, 3, 3, 7, 2.0, 0.5, 0.25, 0.125, (span,), 0.0, 1)

    added, idle = combined([one, IDLE, other])

    assert (added.workers, added.n_in, added.n_out, added.nbytes) == (2, 4, 4, 12)
    assert (added.busy_s, added.starved_s, added.blocked_s, added.memory_wait_s) == (3.0, 1.0, 0.5, 0.25)
    assert (added.spans, added.queued_mean, added.queued_most) == ((span, span), 1.0, 4)
    assert idle == IDLE
