"""What each process of a job takes to open what thousands saved together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from tests.proofs.memory import forget_peak, resident

from penstock.handlers import LocalStore, OrbaxLayout
from penstock.handlers.coordinators.recorded_answers import AnsweredStore, RecordingStore
from penstock.testing import FaultyStore


def open_as_reader(path: Path) -> dict[str, Any]:
    """Open a checkpoint whole, as a restore of all its leaves does."""
    store = FaultyStore(LocalStore())
    forget_peak()
    before, nbytes = resident("VmRSS"), _bytes_read()
    wall, cpu = time.perf_counter(), time.process_time()
    opened = OrbaxLayout().open(store, str(path))
    found = {"open_s": time.perf_counter() - wall, "open_cpu_s": time.process_time() - cpu}
    assert len(opened.leaves)
    return found | {
        "open_bytes": _bytes_read() - nbytes,
        "open_mib": (resident("VmHWM") - before) / 2**20,
        "open_calls": len(store.operations),
    }


def open_once_for_all(path: Path) -> dict[str, Any]:
    """Open it in one process, and in another one with what that one was answered."""
    recorder: Any = RecordingStore(LocalStore())
    OrbaxLayout().open(recorder, str(path))
    told = recorder.encoded()
    store = FaultyStore(LocalStore())
    nbytes, wall, cpu = _bytes_read(), time.perf_counter(), time.process_time()
    opened = OrbaxLayout().open(cast("Any", AnsweredStore(store, told)), str(path))
    found = {"told_s": time.perf_counter() - wall, "told_cpu_s": time.process_time() - cpu}
    assert len(opened.leaves)
    return found | {
        "told_bytes": len(told),
        "told_read_bytes": _bytes_read() - nbytes,
        "told_calls": len(store.operations),
    }


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))
