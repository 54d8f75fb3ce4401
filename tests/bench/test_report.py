"""The table and the picture, of made-up results."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from tests.bench import plot, table
from tests.bench.bars import judge
from tests.bench.contenders.labels import LABELS as EVERYONE
from tests.bench.results import (
    IDLE,
    Memory,
    Note,
    Operation,
    Profile,
    Quiet,
    Results,
    Sample,
    Size,
    Spread,
    StageTime,
    Stall,
)
from tests.bench.units import amount, microseconds, seconds

MACHINE: dict[str, Any] = {
    "date": "2026-01-01",
    "commit": "",
    "cores": 2,
    "processor": "",
    "memory_bytes": 2**34,
    "kernel": "6.1",
    "file_system": "ext4 on /dev/x at /",
    "python": "3.11",
    "versions": {"jax": "0.1", "orbax-checkpoint": "0.2"},
}
LABELS = ("penstock", "Orbax")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def results() -> Results:
    save = Operation.SAVE
    return Results(
        sizes=[Size("large", "a <large> tree", 8, 2**30)],
        samples=[
            Sample("large", "Orbax", save, 0, 0.75),
            Sample("large", "penstock", save, 0, 0.5, 0.01, 2**29),
            Sample("large", "penstock", save, 1, 0.5, 0.03, 2**29),
        ],
        stalls=[
            Stall("large", "penstock", IDLE, 0.004),
            Stall("large", "penstock", save, 0.012),
            Stall("large", "penstock", IDLE, 0.014, "trio"),
            Stall("large", "penstock", save, 0.013, "trio"),
            Stall("large", "Orbax", save, 1.5),
        ],
        memory=[Memory("large", "penstock", save, 2**28, 2**28, 9)],
        profiles=[
            Profile("large", save, 0.5, (StageTime("write", 0.4, 0.1, 0),)),
            Profile("large", Operation.COLD_NUMPY, 0.5, (StageTime("read", 0.4, 0.1, 0),)),
        ],
        notes=[Note("large", "numpy", "left out"), Note("large", "raw", "broke", failed=True)],
    )


def lines_of(results: Results, **options: bool) -> list[str]:
    return table.render(results, judge(results), MACHINE, LABELS, **options).splitlines()


def test_a_row_says_all_that_is_known(results: Results) -> None:
    row = next(line for line in lines_of(results) if line.startswith("  penstock"))

    assert row.split()[1:] == [
        *("2", "500", "ms", "(500..500)", "2,048", "62,500", "20", "ms", "(10..30)"),
        *("50.0%", "256", "MiB", "(25%)", "12", "ms", "(12..12)"),
    ]


def test_stalls_stand_beside_their_loop_and_its_noise(results: Results) -> None:
    lines = lines_of(results)
    at = next(at for at, line in enumerate(lines) if line.startswith("longest stall"))
    rows = [line.split() for line in lines[at + 1 : at + 4]]

    assert lines[at].split()[6:] == ["loop", "idle", "(noise", "floor)", "save"]
    assert rows == [
        ["penstock", "asyncio", "4", "ms", "(4..4)", "12", "ms", "(12..12)"],
        ["penstock", "trio", "14", "ms", "(14..14)", "13", "ms", "(13..13)"],
        ["Orbax", "asyncio", "1.5", "s", "(1.5..1.5)"],
    ]


def test_steps_have_no_bytes_and_a_picture_of_their_own(results: Results) -> None:
    results.sizes.append(Size("steps", "a directory", 20_000, 0, "step"))
    results.samples.append(Sample("steps", "penstock", Operation.OPEN, 0, 0.5))
    lines = lines_of(results)
    at = lines.index("steps: a directory (20,000 steps)")
    group = ElementTree.fromstring(plot.draw(results, MACHINE, LABELS)).find(f"{SVG}g[@id='steps']")

    assert lines[at + 1].split("  ")[-1] == "stall"
    assert "µs/step" in lines[at + 1]
    assert lines[at + 3].split() == ["penstock", "1", "500", "ms", "(500..500)", "25.0"]
    assert group is not None
    assert [text.text for text in group.iter(f"{SVG}text")][-1] == "500 ms"


def test_the_report_warns_of_a_busy_machine(results: Results) -> None:
    assert not [line for line in lines_of(results) if line.startswith("NOT ALONE")]

    results.quiet = [Quiet("small", 0.4, 0.1), Quiet("large", 2.0, 0.7)]
    lines = lines_of(results)
    (told,) = [line for line in lines if line.startswith("NOT ALONE")]
    assert "0.7 processors busy before 'large'" in told
    assert "load average" not in told
    assert "just before: load average 2.00, 0.70 processors busy" in lines

    results.quiet = [Quiet("large", 0.6, 0.0)]
    assert any("load average 0.60 at the start" in line for line in lines_of(results))


def test_contenders_come_in_their_order_and_notes_below(results: Results) -> None:
    lines = lines_of(results)
    beginnings = [
        "large: a <large>",
        "save",
        "  penstock",
        "  Orbax",
        "longest stall",
        "numpy: left",
        "FAILED raw",
    ]
    found = [next(at for at, line in enumerate(lines) if line.startswith(begin)) for begin in beginnings]

    assert found == sorted(found)


def test_the_report_lists_bars_and_splits_the_time_of_those_missed(results: Results) -> None:
    lines = lines_of(results)
    (bar,) = [line for line in lines if line.startswith("1 GiB saved: times Orbax's default")]
    taken_apart = [line for line in lines if line.startswith("where the time goes")]

    assert bar.split()[-2:] == ["1.5", "short"]
    assert [line.split(",")[1].strip() for line in taken_apart] == ["save"]
    assert any(line.split() == ["write", "400", "ms", "100", "ms", "0", "ms", "0", "ms"] for line in lines)


def test_a_quick_run_says_that_it_proves_nothing(results: Results) -> None:
    assert table.QUICK in lines_of(results, quick=True)
    assert table.QUICK not in lines_of(results)


def test_columns_are_aligned() -> None:
    assert table.aligned([("a", "1"), ("long", "22")]) == "a      1\nlong  22"


def test_a_range_is_in_the_unit_of_its_median() -> None:
    assert table.ranged(Spread(0.5, 0.1, 2)) == "500 ms (100..2,000)"
    assert table.ranged(Spread(1.25, 0.5, 2)) == "1.25 s (0.5..2)"
    assert table.ranged(Spread(2e-6, 1e-6, 0.001)) == "2 µs (1..1,000)"
    assert table.ranged(None) == ""


def test_the_picture_shows_each_median_to_scale(results: Results) -> None:
    root = ElementTree.fromstring(plot.draw(results, MACHINE, LABELS))
    group = root.find(f"{SVG}g[@id='large']")
    assert group is not None
    widths = [float(bar.get("width", "")) for bar in group.iter(f"{SVG}rect")]
    texts = [text.text for text in group.iter(f"{SVG}text")]

    assert widths[0] / widths[1] == pytest.approx(0.5 / 0.75, rel=0.01)
    assert [t for t in texts if t in {*LABELS, "500 ms", "750 ms"}] == [
        "penstock",
        "500 ms",
        "Orbax",
        "750 ms",
    ]


@pytest.mark.parametrize("label", EVERYONE)
def test_everyone_can_be_in_the_picture(results: Results, label: str) -> None:
    results.samples.append(Sample("large", label, Operation.SAVE, 0, 0.25))
    root = ElementTree.fromstring(plot.draw(results, MACHINE, EVERYONE))
    assert label in [text.text for text in root.iter(f"{SVG}text")]


def test_a_picture_without_figures_is_drawn() -> None:
    assert ElementTree.fromstring(plot.draw(Results(), MACHINE, LABELS)).tag == f"{SVG}svg"


def test_units() -> None:
    assert [amount(n) for n in (5, 2048, 3 * 2**20, 1010 * 2**20, 2**31)] == [
        *("5 B", "2 KiB", "3 MiB", "1,010 MiB", "2 GiB"),
    ]
    assert [seconds(s) for s in (0.0015, 2.5)] == ["1.5 ms", "2.5 s"]
    assert [microseconds(s) for s in (1.25e-5, 0.0015)] == ["12.5", "1,500"]
