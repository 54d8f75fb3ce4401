"""Workloads in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.bench.contenders.labels import COLD
from tests.bench.loops import is_here
from tests.bench.machine import ROOT
from tests.bench.options import Options
from tests.bench.place import check_space
from tests.bench.results import Note, Results
from tests.bench.workloads import Workload

N_COPIES = 9  # one of each contender, and one that is being replaced


class WorkerError(Exception):
    """A process of the benchmark ended before its work was done."""


def run_workload(workload: Workload, options: Options, place: Path) -> Results:
    """Run one workload, and remove what it wrote.

    Raises:
        WorkerError: If its process failed; it has said why on its standard error.
        NoSpaceError: If the checkpoints do not fit.
    """
    return _run(workload, options, place, N_COPIES * (2 if workload.name == "changed" else 1))


def run_stalls(workload: Workload, options: Options, place: Path, loop: str) -> Results:
    """Watch one event loop beside penstock, in a process of its own. Raises what `run_workload` does."""
    if not is_here(loop):
        return Results(notes=[Note(workload.name, "penstock", f"stalls: {loop} is not installed")])

    return _run(workload, options, place, 2, loop)


def run_cold(workload: Workload, options: Options, place: Path, loop: str) -> Results:
    """Measure first calls, each variant in a process of its own. Raises what `run_workload` does."""
    if not is_here(loop):
        return Results(notes=[Note(workload.name, "penstock", f"first calls: {loop} is not installed")])

    # An installed package has its bytecode. Without it, each long module holds the interpreter while it is
    # compiled, and the loop with it.
    folders = [str(ROOT / name) for name in ("kernel", "stages", "handlers", "src")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], check=True)
    results = Results()
    for label in COLD:
        sys.stderr.write(f"{workload.name} on {loop}: {label}\n")
        more = {"variant": label}
        results.add(_run(workload, options, place, 2, loop, program="tests.bench.cold_process", more=more))

    return results


def _run(
    workload: Workload,
    options: Options,
    place: Path,
    n_copies: int,
    loop: str | None = None,
    *,
    program: str = "tests.bench.worker",
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Results:
    scale = workload.quick if options.quick else 1.0
    check_space(place, int(workload.nbytes * scale), n_copies)
    folder = Path(tempfile.mkdtemp(prefix=f"{workload.name}-", dir=place))
    output = place / f"{folder.name}.json"
    asked = {
        "workload": workload.name,
        "scale": scale,
        "rounds": options.rounds or (1 if options.quick else workload.rounds),
        "orbax": options.with_orbax,
        "loop": loop,
        "folder": str(folder),
        "output": str(output),
        **more,
    }
    try:
        command = [sys.executable, "-m", program, json.dumps(asked)]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment(workload), stdin=subprocess.DEVNULL, check=False
        )
        if ended.returncode:
            raise WorkerError(f"the process of {workload.name!r} ended with {ended.returncode}")

        return Results.from_json(json.loads(output.read_text()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(workload: Workload) -> Mapping[str, str]:
    """What jax reads when it is imported; the rest as it is here."""
    found: dict[str, Any] = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={workload.devices}"
    found["PYTHONPATH"] = os.pathsep.join(filter(None, ["src", ".", os.environ.get("PYTHONPATH", "")]))
    return found
