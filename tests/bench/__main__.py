"""Runs the benchmark: `make bench`, or `python -m tests.bench --help`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.bench import bars, noise, plot, table
from tests.bench.contenders.labels import LABELS
from tests.bench.jobs import run_together
from tests.bench.loops import LOOPS
from tests.bench.machine import ROOT, facts
from tests.bench.memory import measure_memory
from tests.bench.options import Options, parse
from tests.bench.place import open_place
from tests.bench.processes import run_cold, run_stalls, run_workload
from tests.bench.results import FORMAT, Note, Results
from tests.bench.workloads import BY_NAME


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, and return the exit code: 1 only if something went wrong."""
    options = parse(arguments)
    results = Results()
    with open_place(options.folder) as place:
        machine = facts(place)
        for name in options.workloads:
            _one(results, options, name, place)
            _keep(results, options, machine)  # a run that is broken off keeps what it has

    sys.stdout.write(table.render(results, bars.judge(results), machine, LABELS, quick=options.quick))
    sys.stdout.write(f"\nEvery figure is in {_shown(options.json)}, a picture in {_shown(options.svg)}.\n")
    return int(any(note.failed for note in results.notes))


def _one(results: Results, options: Options, name: str, place: Path) -> None:
    workload = BY_NAME[name]
    try:
        results.quiet.append(noise.look(name))
        if workload.cold:
            for loop in LOOPS:
                results.add(run_cold(workload, options, place, loop))

            return
        if workload.n_processes:
            results.add(run_together(workload, options, place))
            return
        if not options.only_stalls:
            results.add(run_workload(workload, options, place))
        for loop in LOOPS if workload.stalls else ():
            results.add(run_stalls(workload, options, place, loop))
        if workload.memory and options.with_memory:
            results.add(measure_memory(workload, options, place))
    except Exception as error:  # a workload that fails is told, and does not end the others
        results.notes.append(Note(name, "benchmark", f"{type(error).__name__}: {error}", failed=True))
        sys.stderr.write(f"{name}: {error}\n")


def _keep(results: Results, options: Options, machine: dict[str, Any]) -> None:
    record: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine,
        "quick": options.quick,
        "bars": [vars(verdict) for verdict in bars.judge(results)],
        **results.as_json(),
    }
    write(options.json, json.dumps(record, indent=1) + "\n")
    write(options.svg, plot.draw(results, machine, LABELS))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # so that the folder is removed
    sys.exit(main())
