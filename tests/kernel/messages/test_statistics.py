from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.kernel.messages.statistics import StageMeter, StageStatistics, bottleneck

IDLE = StageStatistics("idle", 1, 0, 0, 0, 0.0, 0.0, 0.0)


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
