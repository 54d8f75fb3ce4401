"""One workload in a process of its own. Its argument is JSON; so are the results, in a file.

Of its own because XLA's devices are chosen when jax is imported, and so that what one workload leaves
in memory is not measured with the next.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import anyio
from tests.bench import trees
from tests.bench.beside import measure_beside
from tests.bench.contenders.everyone import others, ours
from tests.bench.contenders.managers import everybody
from tests.bench.contenders.penstock import n_threads
from tests.bench.contenders.raw import IN_FLIGHT
from tests.bench.loops import run_on
from tests.bench.results import Note, Results
from tests.bench.steps import measure_steps
from tests.bench.timing import measure, measure_stalls
from tests.bench.workloads import BY_NAME


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # a failure is in the results

    Path(options["output"]).write_text(json.dumps(measured(options).as_json()))


def measured(options: dict[str, Any]) -> Results:
    """All that this process is to measure."""
    workload, folder = BY_NAME[options["workload"]], Path(options["folder"]).resolve()
    rounds, with_orbax = options["rounds"], options["orbax"]
    if workload.n_steps:
        n_steps = int(workload.n_steps * options["scale"])
        managers = everybody(with_orbax=with_orbax)
        return anyio.run(measure_steps, workload, n_steps, rounds, folder, managers)

    state = trees.build(workload.name, options["scale"])
    if workload.name == "beside":
        contenders = others(with_orbax=with_orbax)
        return anyio.run(measure_beside, workload, state, rounds, folder, contenders)
    if options["loop"] is not None:
        loop = options["loop"]
        return run_on(loop, measure_stalls, workload, state, rounds, folder, loop)

    results = anyio.run(
        measure,
        workload,
        state,
        rounds,
        folder,
        ours(all_ways=workload.all_ways),
        others(with_orbax=with_orbax, in_shards=workload.in_shards, all_ways=workload.all_ways),
    )
    results.notes.append(Note(workload.name, "raw", raw_ways(n_threads("save"), n_threads("restore"))))
    return results


def raw_ways(n_writers: int, n_readers: int) -> str:
    """Say how the system calls were used."""
    return f"{n_writers} threads write and {n_readers} read, as in penstock; cold: {IN_FLIGHT} in flight"


if __name__ == "__main__":
    main()
