"""A sample of `make faults`: each course and each layout once, and of the contents those that differ most."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.proofs.faults import look
from tests.proofs.recorded_courses import COURSES, LAYOUTS, pairs
from tests.proofs.traced_courses import ORBAX_COURSES

# Course and layout of the sample; each course and each layout is in it.
SAMPLE = {
    *[(course, "ocdbt") for course in COURSES],
    ("link", "zstd"),
    ("link to a copy", "directories"),
    ("new", "zarr3"),
    ("overwrite the base", "items"),
    ("step", "third party"),
    ("overwrite", "safetensors"),
}


def case(course: str, layout: str) -> Any:
    marks = [] if (course, layout) in SAMPLE else [pytest.mark.slow]
    return pytest.param(course, layout, marks=marks, id=f"{course}, {layout}")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("course", "layout"), [case(*pair) for pair in pairs()])
def test_a_power_loss_leaves_the_previous_state_or_the_new(folder: Path, course: str, layout: str) -> None:
    found = look(folder, course, layout, limit=8, every=40)

    assert found.problems == []
    assert found.states["previous"] + found.states["new"] == found.n_losses > 1
    assert found.states["new"] > 0


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace")
@pytest.mark.parametrize("course", ["overwrite", "link to a copy", *ORBAX_COURSES])
def test_a_power_loss_between_system_calls_leaves_the_previous_state_or_the_new(
    folder: Path, course: str
) -> None:
    found = look(folder, course, "ocdbt", limit=8, every=40, traced=True)

    assert found.problems == []
    assert found.states["new"] > 0
    if course == "overwrite":  # what a store promises is what the kernel was asked for
        recorded = look(folder.with_name("recorded"), course, "ocdbt", limit=1, every=1000)
        assert found.n_prefixes == recorded.n_prefixes


def test_the_sample_has_each_course_and_each_layout() -> None:
    assert {course for course, _ in SAMPLE} == {*COURSES}
    assert {layout for _, layout in SAMPLE} == {*LAYOUTS}
    assert {*pairs()} >= SAMPLE
