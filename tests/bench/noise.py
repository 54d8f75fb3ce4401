"""What else the machine does: looked at just before a workload, while the benchmark itself does nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.bench.results import Quiet

LOOK_S = 1.0
MOST_LOAD = 0.5
MOST_BUSY = 0.2
_STAT = Path("/proc/stat")


def look(workload: str, seconds: float = LOOK_S) -> Quiet:
    """Do nothing for a second, and say how busy the processors were. Blocking."""
    load, before = os.getloadavg()[0], _text()
    time.sleep(seconds)
    return Quiet(workload, load, busy_cores(before, _text()))


def busy_cores(before: str, after: str) -> float:
    """How many processors were not idle between two looks at /proc/stat; 0 if it says nothing.

    Time that the host of a virtual machine gave to others counts, waiting for a disk does not.
    """
    (total, idle), n_cores = (_ticks(after), after.count("\ncpu"))
    earlier, earlier_idle = _ticks(before)
    return n_cores * (1 - (idle - earlier_idle) / (total - earlier)) if total > earlier else 0.0


def warning(found: list[Quiet]) -> str:
    """Say that the figures were measured beside something else; empty if they were not."""
    if not found:
        return ""

    said: list[str] = []
    if found[0].load_1 > MOST_LOAD:
        said.append(f"load average {found[0].load_1:.2f} at the start")

    said.extend(
        f"{quiet.busy_cores:.1f} processors busy before {quiet.workload!r}"
        for quiet in found
        if quiet.busy_cores > MOST_BUSY
    )
    return f"NOT ALONE: something else was at work on this machine ({', '.join(said)})." if said else ""


def _ticks(stat: str) -> tuple[int, int]:
    """All of them, and the idle ones."""
    found = [int(number) for number in stat.partition("\n")[0].split()[1:9]]  # those of guests are in user
    return sum(found), sum(found[3:5])


def _text() -> str:
    try:
        return _STAT.read_text()
    except OSError:
        return ""
