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
from tests.bench.contenders.everyone import others, ours
from tests.bench.contenders.penstock import n_threads
from tests.bench.contenders.raw import IN_FLIGHT
from tests.bench.results import Note
from tests.bench.timing import measure
from tests.bench.workloads import BY_NAME


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # a failure is in the results

    results = anyio.run(
        measure,
        BY_NAME[options["workload"]],
        trees.build(options["workload"], options["scale"]),
        options["rounds"],
        Path(options["folder"]).resolve(),
        ours(),
        others(with_orbax=options["orbax"]),
    )
    results.notes.append(Note(options["workload"], "raw", raw_ways(n_threads("save"), n_threads("restore"))))
    Path(options["output"]).write_text(json.dumps(results.as_json()))


def raw_ways(n_writers: int, n_readers: int) -> str:
    """Say how the system calls were used."""
    return f"{n_writers} threads write and {n_readers} read, as in penstock; cold: {IN_FLIGHT} in flight"


if __name__ == "__main__":
    main()
