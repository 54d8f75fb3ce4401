"""Ends one process of three at each point of a save, and looks at what the others say and what is left.

`make processes` does all of it and writes the table of docs/reference/process-kills.md. Where only some fates
are tried, the rows of the others stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.processes.launcher import start_members
from tests.processes.trees import P, mesh_of, spread
from tests.proofs.killed_member import ENDED_AT, ONLY_PRIMARY, POINTS, Fate

import penstock.sync
from penstock.config import JobLimits
from penstock.errors import InUseError

MODES = [
    *[f"{how} {mode}" for how in ("KILL", "STOP") for mode in ("default", "recoverable")],
    *[f"{how} default" for how in ("RAISE", "CANCEL", "DIFFER")],
]
COLUMNS = (
    "who",
    "where",
    "how",
    "jax",
    "what the others raise, of whom, seen where, after",
    "next job",
    "woken",
    "",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"
COUNT = 3
PATIENT = JobLimits(join_s=60.0, write_s=60.0, silence_s=40.0, beat_s=0.5, call_s=20.0)
HASTY = JobLimits(join_s=5.0, write_s=30.0, silence_s=5.0, beat_s=0.5, call_s=3.0)
MOST_S = 90.0
"""For all of a job; one that takes longer counts as hanging."""

AT_ONCE_S = 1.0
"""Within which all hear of a failure of one that lives."""

SEEN_IN = {"call": "join", "plan": "flatten", "publish": "finalize"}
"""The stage that the error names, where it is not called as the point."""

SLACK_S = 2.0
"""What the machine adds: six processes share two cores here."""


@dataclass
class Cell:
    """What came of one fate."""

    fate: Fate
    told: dict[int, Any] = field(default_factory=dict[int, Any])
    codes: dict[int, int | None] = field(default_factory=dict[int, "int | None"])
    next_job: str = ""
    woken: Any = None
    problems: list[str] = field(default_factory=list[str])


def tree_of(count: int) -> dict[str, Any]:
    """Return what is saved: over all processes, on all of them, and on the host."""
    values, specs = values_of(count), {"rows": P("host"), "all": P()}
    return {**values, **spread({name: values[name] for name in specs}, specs, mesh_of(count))}


def values_of(count: int) -> dict[str, Any]:
    """Return the same, whole."""
    x = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)[: 60 // count * count]
    return {"rows": x, "all": x + 1, "host": np.arange(7)}


def fates(modes: Sequence[str]) -> list[Fate]:
    """Return every one, those of a mode ("KILL default", for example) together."""
    found: list[Fate] = []
    for mode in modes:
        how, jax_mode = mode.split()
        for who in range(1 if how == "DIFFER" else 0, COUNT):
            points = [point for point in POINTS[how] if who == 0 or point not in ONLY_PRIMARY]
            found += [Fate(who, point, how, jax_mode == "recoverable") for point in points]

    return found


def try_fate(fate: Fate, base: Path, looking: threading.Lock) -> Cell:
    """Run one job to its end, then look at what it left as the next job does."""
    cell, folder = Cell(fate), base / fate.name
    folder.mkdir()
    started = start_members("tests.proofs.killed_member", folder, COUNT, [json.dumps(asdict(fate))])
    try:
        _wait(cell, started)
        cell.told = {rank: told for rank in range(COUNT) if (told := _told(folder, rank)) is not None}
        _check_told(cell)
        with looking:
            _look(cell, folder / "run", started)
    finally:
        for process in started:
            process.kill()
            process.wait()

    if cell.problems:
        for rank in range(COUNT):
            log = (folder / f"log.{rank}").read_text(errors="replace")[-3000:]
            cell.problems.append(f"---- process {rank}, exit code {cell.codes.get(rank)}\n{log}")

    return cell


def _wait(cell: Cell, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all that live have ended; one that is stopped is not waited for."""
    end = time.monotonic() + MOST_S
    for rank, process in enumerate(started):
        if rank == cell.fate.who and cell.fate.how == "STOP":
            continue
        try:
            cell.codes[rank] = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            cell.codes[rank] = None
            cell.problems.append(f"process {rank} hangs")


def _told(folder: Path, rank: int) -> Any:
    path = folder / f"told.{rank}"
    return json.loads(path.read_text()) if path.exists() else None


def is_published(fate: Fate) -> bool:
    """Whether the save stands although somebody is gone; who fails alone saves again."""
    return fate.lives or fate.point == ("published" if fate.who == 0 else "decided")


def _check_told(cell: Cell) -> None:
    """Compare what those who live said with what they should."""
    fate, limits = cell.fate, HASTY
    for rank in range(COUNT):
        told = cell.told.get(rank)
        if rank == fate.who and not fate.lives:
            continue
        if told is None:
            if not (fate.who == 0 and fate.how == "KILL" and cell.codes.get(rank) == -signal.SIGABRT):
                cell.problems.append(f"process {rank} said nothing, and jax did not end it")
            continue

        if fate.lives:
            cell.problems += _problems_of_living(fate, rank, told)
            continue

        wanted, seen = _wanted(fate)
        limit_s = limits.silence_s * (1.5 if fate.who == 0 else 1.0)
        if fate.point == "join":
            limit_s = limits.patience_s if fate.who == 0 else limits.join_s
        if told["told"] not in wanted:
            cell.problems.append(f"process {rank} said {told}, not {wanted}")
        elif told["told"] == "saved":
            continue
        elif told["told"] == "CoordinationError":
            if "process 0 of the job" not in told["text"]:
                cell.problems.append(f"process {rank} blamed {told}")
        elif told["processes"] != [fate.who] or told["stage"] not in seen:
            cell.problems.append(f"process {rank} blamed {told}")
        if told["after_s"] > limit_s + 2 * limits.beat_s + SLACK_S:
            cell.problems.append(f"process {rank} took {told['after_s']:.1f} s")


def _problems_of_living(fate: Fate, rank: int, told: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with what a process said of a failure, which all hear of at once."""
    if rank != fate.who and _came_late(fate, told):
        return

    differs, stage = fate.how == "DIFFER", SEEN_IN.get(fate.point, fate.point)
    own = {"CANCEL": "SaveCancelledError", "DIFFER": "PlansDifferError"}.get(fate.how)
    if rank == fate.who and not differs:
        if own is not None and told["told"] != own:
            yield f"process {rank} said {told}, not {own}"
    elif told["told"] != ("PlansDifferError" if differs else "PeerFailedError"):
        yield f"process {rank} said {told}"
    elif told["processes"] != [fate.who] or not (differs or told["stage"] == stage):
        yield f"process {rank} blamed {told}"
    if told["after_s"] > AT_ONCE_S + SLACK_S:
        yield f"process {rank} took {told['after_s']:.1f} s"
    if told["again"]["told"] != "saved":
        yield f"process {rank} could not save again: {told['again']}"


def _came_late(fate: Fate, told: Mapping[str, Any]) -> bool:
    """True if a process came to the others' second try: its own second call finds none of them.

    Only where the first try ends before all have come to it. That what it was told is so is looked at later:
    the step is there, with these values.
    """
    missed = fate.point == "agree" and told["told"] == "saved"
    return missed and told["again"]["told"] == "PeerSilentError" and told["again"]["stage"] is None


def _wanted(fate: Fate) -> tuple[set[str], set[str | None]]:
    """Return which errors are right, and which stages they may name."""
    if fate.who != 0:
        seen = None if fate.point == "join" else fate.point
        return ({"saved"}, set()) if fate.point == "decided" else ({"PeerSilentError"}, {seen})
    if fate.how == "KILL":  # whoever hears of it before jax ends it
        return {"PeerSilentError", "OutcomeUnknownError", "CoordinationError"}, {*ENDED_AT, None}
    if fate.point == "join":
        return {"PeerSilentError"}, {None}
    if fate.point == "published":
        return {"OutcomeUnknownError"}, {"publish"}

    return {"PeerSilentError"}, {"publish" if fate.point == "decided" else fate.point}


def _look(cell: Cell, run: Path, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Do what the next job does: read the earlier step, save the other one, and find nothing else."""
    fate = cell.fate
    values = values_of(COUNT)
    with penstock.sync.Checkpointer() as checkpointer:
        _compare(cell, checkpointer.restore(run / "step_1"), values)
        is_there = (run / "step_2").exists()
        if is_there != is_published(fate):
            cell.problems.append(f"step_2 is there: {is_there}")
        elif is_there:
            _compare(cell, checkpointer.restore(run / "step_2"), values)

        try:
            checkpointer.save(run / "step_2", values, overwrite=True).result(30.0)
            cell.next_job = "saves"
        except InUseError:
            cell.problems.append("the directory is still held")

        if fate.how == "STOP":
            _wake(cell, run, started[fate.who])

    if sorted(os.listdir(run)) != ["step_1", "step_2"]:
        cell.problems.append(f"left: {sorted(os.listdir(run))}")


def _wake(cell: Cell, run: Path, process: subprocess.Popen[bytes]) -> None:
    before = digests(run, ("step_1", "step_2"))
    os.kill(process.pid, signal.SIGCONT)
    try:
        cell.codes[cell.fate.who] = process.wait(MOST_S / 2)
    except subprocess.TimeoutExpired:
        cell.problems.append("the one that woke hangs")

    cell.woken = _told(run.parent, cell.fate.who)
    after = digests(run, ("step_1", "step_2"))
    if after != before:
        changed = sorted({path for path, _ in set(before.items()) ^ set(after.items())})
        cell.problems.append(f"the one that woke changed {changed}")


def digests(run: Path, names: Iterable[str]) -> Mapping[str, str]:
    """Return a digest of every file of some checkpoints."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for name in names
        for path in sorted((run / name).rglob("*"))
        if path.is_file()
    }


def _compare(cell: Cell, found: Any, values: Mapping[str, Any]) -> None:
    cell.problems += [
        f"{name} is not what was saved" for name in values if not np.array_equal(found[name], values[name])
    ]


def row_of(cell: Cell) -> str:
    """Return the row of the table for one fate."""
    fate, said = cell.fate, []
    for rank in range(COUNT):
        told = cell.told.get(rank)
        if rank == fate.who and not fate.lives:
            continue
        if told is None:
            said.append("ended by jax")
        elif told["told"] == "saved":
            said.append("saved")
        else:
            said.append(
                f"{told['told']} {told['processes']} {told['stage'] or 'never'} {told['after_s']:.1f} s"
            )

    woken = "ended by jax" if fate.how == "STOP" else ""
    if cell.woken is not None:
        woken = f"{cell.woken['told']} {cell.woken.get('processes', '')}".strip()

    outcome = "ok" if not cell.problems else "**wrong**"
    jax = "recoverable" if fate.recoverable else "default"
    cells = [
        str(fate.who),
        fate.point,
        fate.how,
        jax,
        "; ".join(dict.fromkeys(said)),
        cell.next_job,
        woken,
        outcome,
    ]
    return f"| {' | '.join(cells)} |"


def write_page(page: Path, rows: Mapping[Fate, str]) -> None:
    """Put rows into the table of a page."""
    said, _, table = page.read_text().partition(HEAD)
    old = {_key(row): row for row in table.splitlines()}
    new = old | {_key(row): row for row in rows.values()}
    keys = [(str(fate.who), fate.point, fate.how, _mode(fate)) for fate in fates(MODES)]
    page.write_text(said + HEAD + "".join(f"{new[key]}\n" for key in keys if key in new))


def _key(row: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in row.split("|")[1:5])


def _mode(fate: Fate) -> str:
    return "recoverable" if fate.recoverable else "default"


def main() -> int:
    """Try the fates that were asked for; return how many went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--only", default="", help="part of a fate's name, such as '1 write'")
    parser.add_argument("--at-once", type=int, default=2, help="jobs")
    parser.add_argument("--page", type=Path, help="the page whose table is written anew")
    asked = parser.parse_args()
    looking = threading.Lock()
    chosen = [fate for fate in fates(asked.modes) if asked.only in fate.name]
    wrong, rows = 0, dict[Fate, str]()
    with tempfile.TemporaryDirectory() as base, ThreadPoolExecutor(asked.at_once) as pool:
        for cell in pool.map(lambda fate: try_fate(fate, Path(base), looking), chosen):
            row = row_of(cell)
            sys.stdout.write(f"{row}\n")
            sys.stdout.writelines(f"{problem}\n" for problem in cell.problems)
            sys.stdout.flush()
            wrong += bool(cell.problems)
            rows[cell.fate] = row

    if asked.page is not None:
        write_page(asked.page, rows)

    sys.stdout.write(f"{len(chosen)} fates, {wrong} went wrong\n")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 100))
