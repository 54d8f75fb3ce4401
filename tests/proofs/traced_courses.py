"""Courses recorded by their system calls: nothing is believed of a store, and code without one is seen, too.

`CrashStore` records what the methods of a store promise. Here a course runs in a process below strace, and
what it asks of the kernel becomes the effects: so a sync that a store forgets is missing, and what
`penstock.orbax` writes counts as well.
"""

from __future__ import annotations

__all__ = ("ARRAYS", "ORBAX_COURSES", "TracedRecording", "trace")

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from tests.proofs.recorded_courses import COURSES, LAYOUTS, Numbers, Recording, Storing, arrays
from tests.proofs.system_calls import MARK, SystemCalls, strace

import penstock.orbax as ocp
from penstock.handlers import LocalStore
from penstock.kernel import Store
from penstock.orbax import v1
from penstock.testing import PowerLoss
from penstock.testing.crash_store import RecordedDisk


@dataclass
class TracedRecording(Recording):
    """A recording in two processes: the one that does the course marks, the other one reads the trace."""

    marks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    disk: RecordedDisk | None = None

    @property
    def before(self) -> Path:
        """A copy of the folder from when the recording began."""
        return self.folder.with_name("before")

    def begin(self, unsynced: Sequence[Path] = ()) -> Store:
        """Begin to record: from here on, calls count."""
        subprocess.run(["cp", "-a", str(self.folder), str(self.before)], check=True)
        self._mark(unsynced=[str(path.relative_to(self.folder)) for path in unsynced])
        return LocalStore()

    def may_be(self, **places: int | Sequence[int | None] | None) -> None:
        """Say what may lie at places from now on."""
        super().may_be(**places)
        self._mark(allowed={name: list(numbers) for name, numbers in self.allowed.items()})

    def _mark(self, **what: Any) -> None:
        self.marks.append(what)
        try:
            os.mkdir(f"{MARK}/{len(self.marks) - 1}")  # fails, and is seen in the trace
        except FileNotFoundError:
            return

    @property
    def n_effects(self) -> int:
        """Effects that were traced."""
        assert self.disk is not None
        return self.disk.n_effects

    def power_losses(self, limit: int) -> Iterator[PowerLoss]:
        """Yield what a power loss in the course may leave."""
        assert self.disk is not None
        return self.disk.power_losses(limit)


async def trace(course: str, layout: str, folder: Path) -> TracedRecording:
    """Run a course below strace, in `folder`, which is made; return what was recorded."""
    folder.mkdir()
    told, lines = folder.with_name("marks"), folder.with_name("trace")
    await anyio.run_process(
        [*strace(lines), sys.executable, "-m", __name__, course, layout, str(folder), str(told)], stderr=None
    )
    recording = TracedRecording(folder, storing_of(course, layout))
    recording.marks, recording.replaced_by = json.loads(told.read_text())
    calls = SystemCalls(folder)
    with lines.open() as found:
        for number in calls.marks_in(found):
            mark = recording.marks[number]
            if "unsynced" in mark:
                unsynced = [str(recording.before / path) for path in mark["unsynced"]]
                recording.disk = RecordedDisk(recording.before, unsynced)
                calls.begin(recording.disk, recording.before)
            else:
                allowed: dict[str, Numbers] = {name: frozenset(of) for name, of in mark["allowed"].items()}
                recording.since.append((calls.n_effects, allowed))

    return recording


def storing_of(course: str, layout: str) -> Storing:
    """Return what is stored in a course, and how."""
    return ARRAYS if course in ORBAX_COURSES else LAYOUTS[layout]


# With Orbax's names

ARRAYS = Storing(arrays)


async def orbax_step(recording: Recording) -> None:
    """A manager with Orbax's names saves a step, and deletes the first one."""

    def save(*steps: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda m: m["loss"], best_mode="max")
        with ocp.CheckpointManager(recording.folder / "run", options=options) as manager:
            for step in steps:
                saved = ocp.args.StandardSave(arrays(step))
                number = {"number": step}
                manager.save(step, args=saved, metrics={"loss": float(step)}, custom_metadata=number)
                manager.wait_until_finished()

    await anyio.to_thread.run_sync(save, 1, 2)
    recording.may_be(step_1=1, step_2=2, step_3=[None, 3])
    recording.begin()
    recording.may_be(step_1=[None, 1])
    recording.replaced_by["1"] = "3"
    await anyio.to_thread.run_sync(save, 3)
    recording.may_be(step_1=None, step_3=3)


async def orbax_overwrite(recording: Recording) -> None:
    """`penstock.orbax.v1.save` over another checkpoint."""

    def save(number: int) -> None:
        path = recording.folder / "new"
        v1.save(path, arrays(number), overwrite=True, custom_metadata={"number": number})

    await anyio.to_thread.run_sync(save, 1)
    recording.may_be(new=[1, 2])
    recording.begin()
    await anyio.to_thread.run_sync(save, 2)
    recording.may_be(new=2)


ORBAX_COURSES: dict[str, Callable[[Recording], Awaitable[None]]] = {
    "Orbax step": orbax_step,
    "Orbax overwrite": orbax_overwrite,
}


async def _do(course: str, layout: str, folder: str, told: str) -> None:
    recording = TracedRecording(Path(folder), storing_of(course, layout))
    await {**COURSES, **ORBAX_COURSES}[course](recording)
    Path(told).write_text(json.dumps([recording.marks, recording.replaced_by]))


if __name__ == "__main__":
    _, *arguments = sys.argv
    anyio.run(partial(_do, *arguments))
