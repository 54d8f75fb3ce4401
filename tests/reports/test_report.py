from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import RestoreReport, SaveReport
from penstock.kernel import Advice, Span, StageStatistics
from penstock.kernel.pipeline import advice_of
from penstock.pipelines import restore_pipeline, save_pipeline
from penstock.reports.diagnosis import bottleneck_of, diagnose, wall_s
from penstock.reports.report import (
    MOST_BARS,
    stage_table,
    timeline_rows,
    timeline_svg,
)

MIB = 2**20
ADVICE = Advice("Work less.", "Take more.")


def stage(name: str, *spans: Span, workers: int = 1, memory_s: float = 0.0) -> StageStatistics:
    busy = sum(span.end - span.start - span.memory_wait_s for span in spans)
    n = len(spans)
    return StageStatistics(
        name, workers, n, n, n * MIB, busy, 1.0, 0.5, memory_s, spans, n / 2, n, advice=ADVICE
    )


FLATTEN = stage("flatten", Span(0, 10.0, 10.5, 0))
COPY = stage("device_to_host", Span(0, 10.5, 13.5, 4 * MIB, 2.0), memory_s=2.0)
WRITE = stage("write", Span(0, 11.0, 12.0, MIB), Span(1, 11.0, 14.0, MIB), workers=2)
STAGES = (FLATTEN, COPY, WRITE)


def test_the_stage_that_is_busy_most_of_the_time_is_the_bottleneck_although_others_wait_for_memory() -> None:
    found = bottleneck_of(STAGES)

    assert found is not None
    assert (found.stage.name, found.why, found.seconds, found.of_s) == ("write", "busy", 3.0, 4.0)
    words = "The stage 'write' is the bottleneck: it was busy 3.00 of 4.00 s, with 2 workers. Work less."
    assert diagnose(STAGES, "save", 9, MIB).text == words


def test_memory_is_the_bottleneck_where_nobody_is_busy_and_somebody_waits_for_it() -> None:
    idle = replace(WRITE, busy_s=1.0, spans=(Span(0, 13.0, 14.0, MIB),))

    words = "Memory is the bottleneck: the stage 'device_to_host' waited 2.00 of 4.00 s for it. Take more."
    assert diagnose((FLATTEN, COPY, idle), "save", 9, MIB).text == words


def test_short_runs_are_told_in_milliseconds_and_empty_ones_in_words() -> None:
    assert (
        "it was busy 2.0 of 2.0 ms" in diagnose([stage("write", Span(0, 1.0, 1.002, 1))], "save", 1, 1).text
    )
    idle = [replace(FLATTEN, n_in=0)]
    assert diagnose(idle, "restore", 0, 0).text == "No stage of this restore had anything to do."
    assert diagnose([], "save", 0, 0).text == "No stage of this save had anything to do."
    assert (wall_s(STAGES), wall_s([])) == (4.0, 0.0)


@pytest.mark.parametrize(
    ("name", "n_leaves", "nbytes", "words"),
    [
        ("commit", 4, 9 * MIB, "save less often, or to a faster `[store]`"),
        ("commit", 1000, 1, "save fewer and larger leaves"),
        ("flatten", 4, 9 * MIB, "`penstock.warm_up()`"),
        ("flatten", 1000, 1, "save fewer and larger ones"),
        ("write", 1000, 100, "little to write"),
        ("write", 4, MIB, "`[save.write] concurrency`"),
    ],
)
def test_what_is_advised_of_many_leaves_or_bytes_is_not_said_of_few(
    name: str, n_leaves: int, nbytes: int, words: str
) -> None:
    slow = replace(stage(name, Span(0, 0.0, 1.0, 1)), advice=advice_of(save_pipeline()[name]))

    assert words in diagnose([slow], "save", n_leaves, nbytes).text


@pytest.mark.parametrize("name", ["plan", "assemble"])
def test_fewer_leaves_are_advised_where_there_are_many_to_restore(name: str) -> None:
    slow = replace(stage(name, Span(0, 0.0, 1.0, 1)), advice=advice_of(restore_pipeline()[name]))

    assert "`only=`" in diagnose([slow], "restore", 1000, 1).text
    assert "`only=`" not in diagnose([slow], "restore", 999, 1).text


def test_every_stage_of_penstock_says_what_to_change() -> None:
    for pipeline in (save_pipeline(), restore_pipeline()):
        assert [slot.name for slot in pipeline if advice_of(slot.stage) == Advice()] == []


def test_a_report_fits_a_terminal() -> None:
    long = stage("a_stage_with_a_long_name", Span(0, 0.0, 12_345.0, MIB))
    large = replace(WRITE, nbytes=10**13, starved_s=12_345.6, blocked_s=99_999.0)
    report = SaveReport("/a/long/path" * 20, 10**6, 10**13, staged_s=1.5, stages=(*STAGES, long, large))

    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("save of /a/long/path")
    assert "1,000,000 leaves" in lines[1]
    assert "staged after 1.500 s" in lines[1]
    assert lines[2].split() == ["stage", "busy", "starved", "blocked", "memory_wait", "MiB", "MiB/s", "queue"]
    assert lines[4].split() == ["device_to_host", "1.000", "1.000", "0.500", "2.000", "1.0", "1.0", "0.5"]
    assert lines[5].split()[:3] == ["write", "x2", "2.000"]
    assert " ".join(lines[8:]) == report.explain()
    assert "a_stage_with_a_l…" in stage_table([long])


def test_a_report_without_stages_is_two_lines() -> None:
    assert str(SaveReport("/p", 3, MIB)).splitlines() == ["save of /p", "3 leaves, 1.0 MiB"]
    assert repr(RestoreReport("/p", 3, 8)) == "RestoreReport(path='/p', n_leaves=3, nbytes=8, changes=())"


def test_a_trace_has_every_span_in_the_row_of_its_worker(tmp_path: Path) -> None:
    report = SaveReport("/p", 3, 8, stages=STAGES)

    text = report.to_trace(tmp_path / "trace.json")

    assert (tmp_path / "trace.json").read_text() == text
    events = json.loads(text)["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(rows.values()) == ["flatten", "device_to_host", "write 0", "write 1"]
    work = [event for event in events if event["ph"] == "X"]
    assert [(rows[event["tid"]], event["ts"], event["dur"]) for event in work] == [
        ("flatten", 0.0, 500_000.0),
        ("device_to_host", 500_000.0, 3_000_000.0),
        ("write 0", 1_000_000.0, 1_000_000.0),
        ("write 1", 1_000_000.0, 3_000_000.0),
    ]
    assert work[1]["args"] == {"nbytes": 4 * MIB, "memory_wait_us": 2_000_000.0}


def test_the_timeline_has_a_row_for_each_worker_and_a_bounded_number_of_bars() -> None:
    many = stage("many", *(Span(0, n / 100, n / 100 + 0.009, 1) for n in range(20 * MOST_BARS)))

    rows = timeline_rows([*STAGES, replace(FLATTEN, spans=())])
    assert [row.label for row in rows] == ["flatten", "device_to_host", "write 0", "write 1"]
    assert rows[1].bars[0].memory_wait_s == 2.0
    (row,) = timeline_rows([many])
    assert len(row.bars) <= 2 * MOST_BARS
    assert timeline_svg([]) == ""
    assert timeline_svg(STAGES).count("<rect") == 5  # one of them waiting


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = SaveReport("/a$b_\x1b[31m", 3, 8, stages=STAGES).plot(tmp_path / "timeline.png")

    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["flatten", "device_to_host", "write 0", "write 1"]
    assert axes.get_title() == "save of /a$b_\\x1b[31m"


def test_what_a_path_holds_reaches_neither_page_nor_terminal() -> None:
    report = RestoreReport("/<script>\x1b[2J", 3, 8, stages=(replace(WRITE, name="<b>"),))

    page = report._repr_html_()
    assert "<script>" not in page
    assert "<b>0" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page + str(report)
    assert re.sub(r"<[^>]*>", " ", page).split()[:3] == ["restore", "of", "/&lt;script&gt;\\x1b[2J"]
