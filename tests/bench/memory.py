"""Peak memory: each operation in a process of its own, watched from outside.

Watched is the sum of anonymous and shared memory (RssAnon and RssShmem in /proc/PID/status), every
millisecond, above what the process held just before. Mapped pages of files are not counted: the
kernel may drop them whenever it likes. The kernel's own peak of all resident pages (VmHWM) is kept,
too; it is exact, and counts them.
"""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from tests.bench.machine import ROOT
from tests.bench.options import Options
from tests.bench.place import check_space
from tests.bench.processes import WorkerError, environment
from tests.bench.results import Memory, Note, Operation, Results
from tests.bench.workloads import Workload

INTERVAL_S = 0.001
# The variants of penstock differ in time only; the system calls have no memory to speak of.
WATCHED = ("penstock", "Orbax", "Orbax uncompressed", "safetensors", "numpy")


def measure_memory(workload: Workload, options: Options, place: Path) -> Results:
    """Measure one workload: for each contender a save, and then restores of what was saved."""
    results = Results()
    scale = workload.quick if options.quick else 1.0
    for label in WATCHED:
        if label.startswith("Orbax") and not options.with_orbax:
            continue
        if label in workload.skipped or label in workload.fewer:
            continue

        check_space(place, int(workload.nbytes * scale), 1)
        folder = Path(tempfile.mkdtemp(prefix=f"memory-{workload.name}-", dir=place))
        try:
            for operation in operations(workload):
                sys.stderr.write(f"{workload.name} memory: {label}: {operation}\n")
                asked = {"workload": workload.name, "scale": scale, "label": label, "operation": operation}
                results.memory.append(_watched(workload, {**asked, "path": str(folder / "checkpoint")}))
        except WorkerError as error:
            results.notes.append(Note(workload.name, label, str(error), failed=True))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return results


def operations(workload: Workload) -> tuple[Operation, Operation]:
    """A save, and a restore into jax; into numpy where the workload has no other."""
    into_jax = Operation.RESTORE_JAX in workload.operations
    return Operation.SAVE, Operation.RESTORE_JAX if into_jax else Operation.RESTORE_NUMPY


def _watched(workload: Workload, asked: dict[str, Any]) -> Memory:
    command = [sys.executable, "-m", "tests.bench.memory_child", json.dumps(asked)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(workload),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    ) as child:
        try:
            return _watch(child, asked)
        finally:
            child.kill()


def _watch(child: subprocess.Popen[bytes], asked: dict[str, Any]) -> Memory:
    """Speak with the child: it says `ready`, is told to go, says `done` and waits to be told to end."""
    assert child.stdin is not None
    assert child.stdout is not None
    status = Path("/proc", str(child.pid), "status")
    if b"ready" not in child.stdout.readline():
        assert child.stderr is not None
        raise WorkerError(_last_line(child.stderr))

    Path("/proc", str(child.pid), "clear_refs").write_text("5")  # begin VmHWM anew
    before = memory_of(status.read_text())
    child.stdin.write(b"go\n")
    peak, n_samples = before["own"], 0
    while not select.select([child.stdout], [], [], INTERVAL_S)[0]:
        peak = max(peak, memory_of(status.read_text())["own"])
        n_samples += 1

    if b"done" not in child.stdout.readline():
        assert child.stderr is not None
        raise WorkerError(_last_line(child.stderr))

    after = memory_of(status.read_text())
    child.stdin.write(b"end\n")
    return Memory(
        asked["workload"],
        asked["label"],
        asked["operation"],
        max(peak, after["own"]) - before["own"],
        after["VmHWM"] - before["VmRSS"],
        n_samples,
    )


def memory_of(status: str) -> dict[str, int]:
    """The memory figures of a process in bytes, and their sum `own` of what only it can give back."""
    found = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in status.splitlines())
        if value.endswith(" kB")
    }
    return {**found, "own": found.get("RssAnon", 0) + found.get("RssShmem", 0)}


def _last_line(stream: IO[bytes]) -> str:
    lines: Iterable[str] = stream.read().decode(errors="replace").strip().splitlines()
    return f"measuring memory: {([*lines] or ['it ended'])[-1]}"[:300]
