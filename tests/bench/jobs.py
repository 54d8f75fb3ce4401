"""Workloads of several processes that save and restore one tree together."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.options import Options
from tests.bench.place import check_space
from tests.bench.processes import WorkerError
from tests.bench.results import Note, Results, Sample, Size
from tests.bench.workloads import Workload
from tests.processes.launcher import start_members

MOST_S = 600.0
"""For all of a workload; then its processes are killed."""


def run_together(workload: Workload, options: Options, place: Path) -> Results:
    """Run one workload in as many processes as it says, and remove what they wrote.

    Raises:
        WorkerError: If one of them failed; what it said is on standard error.
        NoSpaceError: If the checkpoints do not fit.
    """
    scale = workload.quick if options.quick else 1.0
    check_space(place, int(workload.nbytes * scale), 3)
    folder = Path(tempfile.mkdtemp(prefix=f"{workload.name}-", dir=place))
    asked = {
        "nbytes": int(workload.nbytes * scale),
        "rounds": options.rounds or (1 if options.quick else workload.rounds),
        "orbax": options.with_orbax,
    }
    sys.stderr.write(f"{workload.name}: {workload.n_processes} processes\n")
    started = start_members("tests.bench.job_member", folder, workload.n_processes, [json.dumps(asked)])
    try:
        _wait(workload, started, folder)
        told = [json.loads((folder / f"told.{rank}").read_text()) for rank in range(len(started))]
        return results_of(workload, told)
    finally:
        for process in started:
            process.kill()
            process.wait()

        shutil.rmtree(folder, ignore_errors=True)


def _wait(workload: Workload, started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    end = time.monotonic() + MOST_S
    for rank, process in enumerate(started):
        try:
            code = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            sys.stderr.write((folder / f"log.{rank}").read_text(errors="replace")[-4000:])
            raise WorkerError(f"process {rank} of {workload.name!r} ended with {code}")


def results_of(workload: Workload, told: list[Any]) -> Results:
    """Join what all processes measured: an operation takes as long as in the slowest of them."""
    results = Results()
    first = told[0]
    results.sizes.append(Size(workload.name, workload.title, first["n_leaves"], first["nbytes"]))
    for rows in zip(*[each["samples"] for each in told], strict=True):
        label, operation, number = rows[0]["of"]
        seconds, cpu_s = max(row["seconds"] for row in rows), sum(row["cpu_s"] for row in rows)
        results.samples.append(Sample(workload.name, label, operation, number, seconds, cpu_s=cpu_s))

    wrong = sorted({problem for each in told for problem in each["wrong"]})
    for label, problem in map(tuple, wrong):  # then nothing that was measured of it counts
        results.samples = [sample for sample in results.samples if sample.contender != label]
        results.notes.append(Note(workload.name, label, problem, failed=True))

    results.checked += [(workload.name, label, operation) for label, operation in first["checked"]]
    return results
