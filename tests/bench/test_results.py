"""Samples, their spread, and the file."""

from __future__ import annotations

import json

from tests.bench.results import (
    Memory,
    Note,
    Profile,
    Quiet,
    Results,
    Sample,
    Size,
    Spread,
    StageTime,
    Stall,
    median,
    spread,
)


def all_kinds() -> Results:
    return Results(
        sizes=[Size("large", "title", 2, 8)],
        samples=[
            Sample("large", "penstock", "save", 0, 1.5, 0.1, 8, 4096),
            Sample("large", "x", "save", 1, 2.0),
        ],
        stalls=[Stall("large", "penstock", "save", 0.01)],
        memory=[Memory("large", "penstock", "save", 5, 6, 7)],
        profiles=[Profile("large", "save", 1.5, (StageTime("write", 1.0, 0.5, 0.0),))],
        notes=[Note("large", "Orbax", "why", failed=True)],
        quiet=[Quiet("large", 0.5, 0.1)],
        checked=[("large", "penstock", "save")],
    )


def test_what_is_written_as_json_is_read_back() -> None:
    assert Results.from_json(json.loads(json.dumps(all_kinds().as_json()))) == all_kinds()


def test_results_are_added_up() -> None:
    both = all_kinds()
    both.add(all_kinds())

    assert {name: len(kind) for name, kind in vars(both).items() if len(kind) % 2} == {"sizes": 1}
    assert both.seconds("large", "penstock", "save") == [1.5, 1.5]


def test_median_and_range() -> None:
    assert spread([3, 1, 9]) == Spread(3, 1, 9)
    assert median([1, 2]) == 1.5
    assert spread([]) is None
    assert median([]) is None
