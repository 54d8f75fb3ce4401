"""What a run is asked to do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.machine import ROOT
from tests.bench.workloads import BY_NAME, WORKLOADS

DESCRIPTION = "Compare penstock with Orbax, safetensors, numpy and the system calls themselves."


@dataclass(frozen=True)
class Options:
    """The command line, understood."""

    workloads: tuple[str, ...]
    rounds: int | None  #: of every workload, instead of its own
    quick: bool
    with_orbax: bool
    with_memory: bool
    only_stalls: bool  #: of penstock, on each event loop
    folder: Path  #: in which checkpoints are made, in a folder of their own
    json: Path
    svg: Path


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Understand the command line, or say what is wrong with it and exit."""
    parser = argparse.ArgumentParser("python -m tests.bench", description=DESCRIPTION)
    names = ", ".join(BY_NAME)
    parser.add_argument("--only", metavar="NAMES", default="", help=f"some of {names}; with commas between")
    parser.add_argument("--rounds", type=int, help="of every workload, instead of its own number")
    parser.add_argument("--quick", action="store_true", help="smaller trees, one round: to see that it runs")
    parser.add_argument("--no-orbax", action="store_true", help="leave out the slowest contender")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peaks of memory")
    parser.add_argument(
        "--only-stalls", action="store_true", help="penstock's stalls of each event loop alone"
    )
    build = ROOT / "build" / "bench"
    parser.add_argument("--dir", type=Path, default=build, help="where checkpoints are made and removed")
    parser.add_argument("--json", type=Path, help="every raw figure")
    parser.add_argument("--svg", type=Path, help="the picture")
    given = parser.parse_args(arguments)
    by_default = tuple(w.name for w in WORKLOADS if w.stalls or not given.only_stalls)
    chosen = tuple(name for name in given.only.split(",") if name) or by_default
    if unknown := [name for name in chosen if name not in BY_NAME]:
        parser.error(f"no workload is called {unknown[0]!r}; there are {names}")
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds must be at least 1")

    called = "stalls" if given.only_stalls else "results"
    return Options(
        chosen,
        given.rounds,
        given.quick,
        not given.no_orbax,
        not (given.no_memory or given.only_stalls),
        given.only_stalls,
        given.dir,
        given.json or build / f"{called}.json",
        given.svg or build / f"{called}.svg",
    )
