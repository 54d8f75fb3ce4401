"""What a save and a restore by thousands of processes cost, on one machine: `make simulate`.

Each measurement has a process of its own. The coordination is the real one, by jax's own service with a
client for each process as far as that carries, and by a service in memory beyond. The primary's stages are
the real ones, and so are the readers'; what other processes would have written is made up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anyio
from tests.bench.machine import ROOT, facts
from tests.proofs.simulation.chart import draw
from tests.proofs.simulation.page import write_page

SERVICE: Final = (8, 64, 256, 1000)
MEMORY: Final = (8, 64, 256, 1000, 10_000)
TREES: Final = ((10_000, 64), (1_000, 1_000), (100, 10_000))
SMALL: Final = ((4,), (4, 16), ((20, 4),))
BUSIEST: Final = (10_000, 64)
MOST: Final = {"first_cpu_s": 6.0, "again_cpu_s": 2.0, "peak_mib": 600.0}
"""Of the primary, for the busiest tree. Processor seconds, since machines are shared."""

MOST_CALLS: Final = {"calls_primary": 16, "calls_worker": 12}
"""Of one operation, beside heartbeats, the first of which says that a process has come."""


def run_one(what: str, *sizes: int) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else "tests.proofs.simulation", "--child"]
    done = subprocess.run(
        [*command, what, *map(str, sizes)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(json.dumps({"what": what, **found}) + "\n")
    sys.stdout.flush()
    return found


def measure(what: str, *sizes: int) -> dict[str, Any]:
    """Measure here."""
    from tests.proofs.simulation import agreement, primary, readers

    first, *rest = sizes
    if what == "service":
        return anyio.run(agreement.agree_by_the_service, first)
    if what == "memory":
        return anyio.run(agreement.agree_in_memory, first)

    with tempfile.TemporaryDirectory() as folder:
        found = anyio.run(primary.save_as_primary, first, rest[0], Path(folder))
        path = Path(folder) / "step_1"
        return found | readers.open_as_reader(path) | readers.open_once_for_all(path)


def run_all(service: Sequence[int], memory: Sequence[int], trees: Sequence[tuple[int, int]]) -> Any:
    """Return what was measured of everything."""
    return {
        "service": [run_one("service", size) for size in service],
        "memory": [run_one("memory", size) for size in memory],
        "trees": [run_one("tree", *tree) for tree in trees],
    }


def problems(found: Any) -> list[str]:
    """Return what takes more than it may."""
    wrong = [
        f"{each['processes']} processes: {name} {each[name]}, more than {most}"
        for each in (*found["service"], *found["memory"])
        for name, most in MOST_CALLS.items()
        if each[name] > most
    ]
    return wrong + [
        f"{each['leaves']} leaves of {each['processes']} processes: {name} {each[name]:.1f}, more than {most}"
        for each in found["trees"]
        if (each["leaves"], each["processes"]) == BUSIEST
        for name, most in MOST.items()
        if each[name] > most
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the page and the picture, and return how many bounds were exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few processes, to see that it runs")
    parser.add_argument("--page", type=Path, help="the page whose tables are written anew")
    parser.add_argument("--svg", type=Path, help="where to draw the picture")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WHAT",
        help="one measurement, as JSON: service N, memory N, or tree LEAVES PROCESSES",
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.child:
        what, *sizes = asked.child
        sys.stdout.write(json.dumps(measure(what, *map(int, sizes))) + "\n")
        return 0

    if asked.only:
        what, *sizes = asked.only
        run_one(what, *map(int, sizes))
        return 0

    found = run_all(*(SMALL if asked.small else (SERVICE, MEMORY, TREES)))
    machine = facts(Path(tempfile.gettempdir()))
    if asked.page is not None:
        write_page(asked.page, found, machine)
    if asked.svg is not None:
        asked.svg.write_text(draw(found))

    wrong = problems(found)
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
