"""Advice is followed, on made-up machines, and its runs are compared: it helps as much as it promised.

No time passes: `simulated_runs` moves messages on a clock, and knows nothing of the model that is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import pytest
from tests.reports.simulated_runs import DEFAULTS, MIB, Flow, Machine

from penstock import RestoreReport, SaveReport
from penstock.kernel import Span, StageStatistics
from penstock.reports.diagnosis import GAIN, Settings, alternatives, fit

MACHINES = {
    "latency": Machine(latency_s=0.05),
    "each": Machine(stream_rate=8e6),
    "all": Machine(total_rate=32e6),
    "each, up to a total": Machine(latency_s=0.01, stream_rate=8e6, total_rate=64e6),
    "fast": Machine(),
    "slow copies": Machine(copy_rate=100 * MIB),
}
BEGINNINGS = {
    "the defaults": DEFAULTS,
    "one writer": replace(DEFAULTS, concurrency=1),
    "16 writers": replace(DEFAULTS, concurrency=16),
    "small pieces": replace(DEFAULTS, piece_bytes=MIB),
    "a small budget": replace(DEFAULTS, limit_bytes=16 * MIB),
    "a tiny budget": replace(DEFAULTS, limit_bytes=MIB),
    "little in flight": replace(DEFAULTS, in_flight_bytes=4 * MIB),
}
FLOWS: tuple[Flow, ...] = ("save", "restore")
STORE = {"save": "write", "restore": "read"}
EVERY = [
    pytest.param(flow, machine, settings, id=f"{flow}: {name}: {beginning}")
    for flow in FLOWS
    for name, machine in MACHINES.items()
    for beginning, settings in BEGINNINGS.items()
]
Report: TypeAlias = SaveReport | RestoreReport


def followed(flow: Flow, machine: Machine, settings: Settings) -> Iterator[tuple[Report, Report]]:
    """Yield the report before each step and after it, while there is advice."""
    report = machine.run(flow, settings)
    for _ in range(9):
        advised = report.diagnosed()
        if not advised.options:
            return

        settings = settings.with_options(flow, advised.options)
        after = machine.run(flow, settings)
        yield report, after
        report = after

    raise AssertionError("advice without an end")


@pytest.mark.parametrize(("flow", "machine", "settings"), EVERY)
def test_who_follows_the_advice_is_as_fast_as_it_says(
    flow: Flow, machine: Machine, settings: Settings
) -> None:
    for before, after in followed(flow, machine, settings):
        advised = before.diagnosed()
        if not advised.is_sure:  # and then it says on what it depends
            assert "this run does not show" in advised.text
            streams = next(stage.workers for stage in before.stages if stage.name == STORE[flow])
            is_shared = streams * machine.stream_rate >= machine.total_rate
            if "only fewer bytes help" in advised.text and is_shared:
                assert after.wall_s <= 1.02 * before.wall_s
                continue

        assert after.wall_s < before.wall_s
        workers = advised.options.get(f"{flow}.{STORE[flow]}.concurrency", 0)
        assert isinstance(workers, int)
        # No run shows a limit that only more streams reach.
        if advised.is_sure and workers * machine.stream_rate <= machine.total_rate:
            assert after.wall_s == pytest.approx(advised.expected_s, rel=0.25)


@pytest.mark.parametrize(("flow", "machine", "settings"), EVERY)
def test_where_it_ends_no_other_setting_is_much_faster(
    flow: Flow, machine: Machine, settings: Settings
) -> None:
    last = machine.run(flow, settings)
    for _, after in followed(flow, machine, settings):
        last = after

    assert last.limits is not None
    reached = Settings(
        next(stage.workers for stage in last.stages if stage.name == STORE[flow]),
        last.limits.chosen_piece_bytes,
        last.limits.budget_bytes,
        last.limits.in_flight_bytes,
    )
    assert last.diagnosed().options == {}
    others = [
        replace(reached, concurrency=n, piece_bytes=m * MIB) for n in (4, 16, 64) for m in (1, 4, 16, 64)
    ]
    assert 0.8 * last.wall_s <= min([machine.run(flow, each).wall_s for each in others])


@pytest.mark.parametrize(
    ("machine", "settings", "limit", "options", "words"),
    [
        (
            "fast",
            BEGINNINGS["a small budget"],
            "memory",
            {"memory.limit_bytes": 256 * MIB},
            (
                "Memory is the bottleneck: the budget of 16 MiB makes 65 messages of what could travel in 5. "
                '`[memory] limit_bytes = "256MiB"`: about 0.04 s instead of 0.1.'
            ),
        ),
        (
            "each",
            BEGINNINGS["16 writers"],
            "parallelism",
            {"save.piece_bytes": 4 * MIB},
            (
                "Parallelism is the bottleneck: 5 messages for 16 workers of 'write'. "
                '`[save] piece_bytes = "4MiB"`: about 0.58 s instead of 2.1, if'
            ),
        ),
        (
            "latency",
            BEGINNINGS["small pieces"],
            "latency",
            {"save.piece_bytes": 8 * MIB},
            (
                "The store's latency is the bottleneck: each of 65 messages of 'write' waits 50 ms, whatever "
                'its size. `[save] piece_bytes = "8MiB"`: about 0.46 s instead of 1.2.'
            ),
        ),
        (
            "fast",
            BEGINNINGS["small pieces"],
            "messages",
            {"save.piece_bytes": 16 * MIB},
            "Small messages are the bottleneck: 1 ms of the event loop for each of 65 messages.",
        ),
        (
            "each",
            BEGINNINGS["one writer"],
            "bandwidth",
            {"save.write.concurrency": 4},
            (
                "The store's bandwidth is the bottleneck: 'write' was busy 8.40 of 8.40 s, with 7.65 MiB/s "
                "for each of 1 worker. `[save.write] concurrency = 4`: about 2.1 s instead of 8.4, if"
            ),
        ),
        ("slow copies", DEFAULTS, "stage", {}, "The stage 'device_to_host' is the bottleneck: "),
        (
            "slow copies",
            BEGINNINGS["a small budget"],
            "memory",
            {"memory.limit_bytes": 256 * MIB},
            (
                "Memory is the bottleneck: the budget of 16 MiB makes 65 messages of what could travel in 5, "
                "and 'device_to_host' was busy 0.71 of 0.71 s with them. `[memory] limit_bytes = "
                '"256MiB"`; how much that gains, this run does not show.'
            ),
        ),
        ("latency", DEFAULTS, "stage", {}, "The stage 'commit' is the bottleneck: "),
    ],
)
def test_what_limits_is_named_with_the_option_its_value_and_the_gain(
    machine: str, settings: Settings, limit: str, options: dict[str, object], words: str
) -> None:
    found = MACHINES[machine].save(settings).diagnosed()

    assert (found.limit, found.options) == (limit, options)
    assert found.text.startswith(words)


def test_a_store_that_is_shared_is_told_from_one_that_is_not_where_the_load_varies() -> None:
    settings = replace(DEFAULTS, piece_bytes=32 * MIB)  # two at once, and then one
    for name, sharing in (("each", "each"), ("all", "all")):
        machine = replace(MACHINES[name], nbytes=80 * MIB)
        report = machine.save(replace(settings, concurrency=2))
        assert report.limits is not None
        fitted = fit("save", report.stages, report.limits)
        assert fitted is not None
        assert fitted.sharing == sharing


def test_where_nothing_helps_that_is_said_and_nothing_does() -> None:
    machine, settings = replace(MACHINES["all"], nbytes=80 * MIB), replace(DEFAULTS, concurrency=2)
    settings = replace(settings, piece_bytes=32 * MIB)
    report = machine.save(settings)

    found = report.diagnosed()

    assert (found.limit, found.options) == ("bandwidth", {})
    assert "Neither more workers nor other pieces nor more memory make it faster; write less: " in found.text
    tried = list(alternatives(settings))
    assert len({each.limit_bytes for each in tried}) > 1
    fastest_s = min([machine.save(each).wall_s for each in tried if each.concurrency in {2, 8, 64}])
    assert fastest_s > GAIN * report.wall_s


def test_a_store_that_takes_one_write_after_another_is_shared() -> None:
    turns = [Span(n % 4, 0.0 if n < 4 else n - 3.0, n + 1.0, 16 * MIB) for n in range(8)]
    busy = sum([span.end - span.start for span in turns])
    write = StageStatistics("write", 4, 8, 8, 128 * MIB, busy, 0.0, 0.0, 0.0, tuple(turns))
    limits = Machine().save(DEFAULTS).limits
    assert limits is not None

    fitted = fit("save", [write], limits)

    assert fitted is not None
    assert fitted.sharing == "all"
    assert fitted.shared.total_rate == pytest.approx(16 * MIB, rel=0.01)


def test_where_all_processors_are_busy_more_workers_are_not_advised() -> None:
    report = MACHINES["each"].save(DEFAULTS)
    assert report.limits is not None
    assert "save.write.concurrency" in report.diagnosed().options
    limits = replace(report.limits, processors=2)

    busy = replace(report, limits=limits, processor_s=1.9 * report.wall_s).diagnosed()
    idle = replace(report, limits=limits, processor_s=0.9 * report.wall_s).diagnosed()

    assert (busy.limit, busy.options) == ("processors", {})
    assert busy.text.startswith("The processors are the bottleneck: all 2 were busy, as with copies and ")
    assert idle == report.diagnosed()


def test_a_budget_with_room_for_one_message_lets_copies_and_writes_wait_for_each_other() -> None:
    machine = Machine(stream_rate=20 * MIB, copy_rate=20 * MIB)
    report, tiny = machine.save(DEFAULTS), replace(DEFAULTS, limit_bytes=MIB)
    assert report.limits is not None
    fitted = fit("save", report.stages, report.limits)
    assert fitted is not None

    assert fitted.each.seconds(tiny) == pytest.approx(machine.save(tiny).wall_s, rel=0.1)


def test_of_what_suffices_alone_the_budget_is_named_that_made_the_messages() -> None:
    machine = Machine(latency_s=0.05, nbytes=16 * MIB, n_small=0)
    settings = replace(DEFAULTS, concurrency=8, limit_bytes=16 * MIB)
    assert machine.save(replace(settings, concurrency=16)).wall_s < 0.92 * machine.save(settings).wall_s

    found = machine.save(settings).diagnosed()

    assert found.limit == "memory"
    assert set(found.options) == {"memory.limit_bytes"}


def test_without_small_messages_the_latency_is_that_of_the_documents() -> None:
    machine = Machine(latency_s=0.05, n_small=0)

    found = machine.save(replace(DEFAULTS, piece_bytes=MIB)).diagnosed()

    assert found.limit == "latency"
    assert set(found.options) == {"save.piece_bytes"}


def test_a_larger_budget_is_not_advised_for_bytes_that_take_none_of_it() -> None:
    report = MACHINES["each"].save(DEFAULTS)  # four writers have 64 MiB at once
    assert report.limits is not None
    limits = replace(report.limits, budget_bytes=16 * MIB, chosen_piece_bytes=16 * MIB)

    options = replace(report, limits=replace(limits, piece_bytes=16 * MIB)).diagnosed().options

    assert "save.write.concurrency" in options
    fitted = fit("save", report.stages, replace(limits, piece_bytes=16 * MIB))
    assert fitted is not None
    assert fitted.each.room(replace(fitted.settings, in_flight_bytes=0)) == float("inf")
