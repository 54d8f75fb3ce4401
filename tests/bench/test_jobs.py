"""The benchmark of several processes: how their figures become one, and the whole with two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.bench.jobs import results_of, run_together
from tests.bench.options import parse
from tests.bench.results import Operation
from tests.bench.workloads import BY_NAME

WORKLOAD = BY_NAME["processes-2"]


def told(seconds: float, *wrong: tuple[str, str]) -> dict[str, Any]:
    samples = [
        {"of": [label, "save", 0], "seconds": seconds, "cpu_s": seconds / 2}
        for label in ("penstock", "Orbax")
    ]
    return {"n_leaves": 4, "nbytes": 100, "samples": samples, "checked": [], "wrong": wrong}


def test_an_operation_takes_as_long_as_in_the_slowest_process_and_the_processors_of_all() -> None:
    results = results_of(WORKLOAD, [told(2.0), told(3.0)])
    assert results.seconds("processes-2", "Orbax", "save") == [3.0]
    assert results.cpu("processes-2", "penstock", "save") == [2.5]


def test_what_restores_something_else_in_one_process_has_no_figures() -> None:
    results = results_of(WORKLOAD, [told(2.0), told(3.0, ("Orbax", "array_0 differs"))])
    assert {sample.contender for sample in results.samples} == {"penstock"}
    assert [(note.contender, note.failed) for note in results.notes] == [("Orbax", True)]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(118)
def test_two_processes_save_and_restore_beside_orbax(tmp_path: Path) -> None:
    small = replace(WORKLOAD, nbytes=2**20, quick=1.0)
    results = run_together(small, parse(["--quick", "--rounds", "1"]), tmp_path)
    assert results.notes == []
    for label in ("penstock", "Orbax"):
        for operation in (Operation.SAVE, Operation.RESTORE_JAX):
            assert len(results.seconds("processes-2", label, operation)) == 1

    assert len(results.checked) == 2
    assert list(tmp_path.iterdir()) == []
