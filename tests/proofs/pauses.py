"""Stops one process of three for a while, again and again, while they save, and looks at whom they blame.

`make pauses` does so 200 times for the primary and 200 times for another process. A process that goes on is
healthy, also the one that was stopped, once it has heard what became of the save. So:

- an error names the one that was stopped, or no process;
- a pause that is shorter than the limit costs no save;
- after each pause all save again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes.launcher import start_members
from tests.proofs.process_kills import COUNT, values_of

import penstock.sync

LIMITS = {"join_s": 60.0, "write_s": 60.0, "silence_s": 4.0, "beat_s": 0.5, "call_s": 10.0}
ROLES = {"primary": 0, "worker": 1}
LENGTHS = {"short": (0.1, 0.6), "about the limit": (0.9, 1.2), "long": (1.7, 2.5)}
"""Of a pause, in parts of `silence_s`. The others give process 0 half as long again."""

RECOVERY_S = 120.0
"""Within which all must have saved twice after a pause."""


@dataclass
class Job:
    """The processes, and what they have written down."""

    folder: Path
    processes: Sequence[Any]
    read: list[int] = field(default_factory=lambda: [0] * COUNT)

    def new(self) -> dict[int, list[dict[str, Any]]]:
        """Return what came of the saves that have ended since the last call, by process."""
        found: dict[int, list[dict[str, Any]]] = {}
        for rank in range(COUNT):
            path = self.folder / f"saves.{rank}"
            text = path.read_text() if path.exists() else ""
            lines = text.split("\n")[:-1]  # the last one may be half written
            found[rank] = [json.loads(line) for line in lines[self.read[rank] :]]
            self.read[rank] = len(lines)

        return found

    def wait_saved(self, n_saves: int) -> dict[int, list[dict[str, Any]]]:
        """Wait until each process has ended well so many saves; return all that ended meanwhile."""
        found: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(COUNT)}
        end = time.monotonic() + RECOVERY_S
        while any(sum(each["came"] == "saved" for each in saves) < n_saves for saves in found.values()):
            if time.monotonic() > end:
                raise TimeoutError(f"not all save again after {RECOVERY_S:g} s: {found}")

            time.sleep(0.05)
            for rank, saves in self.new().items():
                found[rank] += saves

        return found


def pause(job: Job, who: int, seconds: float) -> dict[int, list[dict[str, Any]]]:
    """Stop one process for some time; return what came of the saves until all save again."""
    process = job.processes[who]
    job.new()
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGCONT)
    return job.wait_saved(2)


def problems_of(who: int, length: str, found: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Return what is wrong with what came of a pause."""
    problems: list[str] = []
    for rank, saves in found.items():
        for save in saves:
            if save["came"] == "saved":
                continue
            if not set(save["processes"]) <= {who} or save["came"] == "CoordinationError":
                problems.append(f"process {rank} blamed another one: {save}")
            elif length == "short" or (length == "about the limit" and who == 0):
                problems.append(f"process {rank} lost a save that all could finish: {save}")

    return problems


def main() -> int:
    """Pause each role as often as asked; return how many pauses did harm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pauses", type=int, default=200, help="of each role")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    wrong, chance = 0, random.Random(asked.seed)
    for role in asked.roles:
        came: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as base:
            folder = Path(base)
            started = start_members("tests.proofs.paused_member", folder, COUNT, [json.dumps(LIMITS)])
            job = Job(folder, started)
            try:
                job.wait_saved(2)
                for number in range(asked.pauses):
                    length = list(LENGTHS)[number % len(LENGTHS)]
                    seconds = chance.uniform(*LENGTHS[length]) * LIMITS["silence_s"]
                    time.sleep(chance.uniform(0.0, 0.3))
                    found = pause(job, ROLES[role], seconds)
                    problems = problems_of(ROLES[role], length, found)
                    failed = sorted({save["came"] for saves in found.values() for save in saves} - {"saved"})
                    came[f"{length}: {', '.join(failed) or 'all saved'}"] += 1
                    wrong += bool(problems)
                    for problem in problems:
                        sys.stdout.write(f"{role}, {seconds:.1f} s: {problem}\n")
                        sys.stdout.flush()

                (folder / "last").write_text(str(max(job.read) + 3))
                for process in started:
                    process.wait(RECOVERY_S)

                wrong += _damaged(folder / "run")
            finally:
                for process in started:
                    process.kill()
                    process.wait()

        for what, n_pauses in sorted(came.items()):
            sys.stdout.write(f"{role}, {n_pauses} pauses, {what}\n")

    sys.stdout.write(f"{asked.pauses} pauses of each role, {wrong} did harm\n")
    return wrong


def _damaged(run: Path) -> int:
    """Return how many of the steps that are there cannot be restored as they were saved."""
    damaged, values = 0, values_of(COUNT)
    with penstock.sync.Checkpointer() as checkpointer:
        for step in sorted(run.glob("step_*")):
            if step.name.endswith("tmp"):
                continue

            found = checkpointer.restore(step)
            damaged += any((found[name] != value).any() for name, value in values.items())

    return damaged


if __name__ == "__main__":
    sys.exit(min(main(), 100))
