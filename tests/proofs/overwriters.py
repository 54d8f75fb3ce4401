"""Lets several processes overwrite one checkpoint at once, and reads and copies it. `make overwriters`.

Each saver saves a state in which every number is its own: the saver and its round. It saves to one path with
`overwrite=True`, again and again, half of them into a file for each leaf. One that is refused, since another
is at work, tries again. A reader restores the path all the while, and `penstock cp` copies it. It is demanded
that

* every state that is read, in between, at the end and from a copy, is one saver's and one round's, whole,
* a copy that is refused leaves nothing,
* the path is never absent, once it was there,
* nobody fails but with `InUseError`,
* nothing else lies beside it at the end.

Then one saver saves while another program meddles (`--meddled`): it renames, removes and swaps what is built,
and what is there. It is demanded that after each save that was reported durable, the path can be restored.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import penstock
from penstock import cli
from penstock.errors import IncompleteCheckpointError, NotACheckpointError, PenstockError, StorageError
from penstock.handlers.stores.file_system import RENAME_EXCHANGE, system_renameat2

N_LEAVES = 12
LEAF = 3_000
MEMORY = "/dev/shm"


def state(saver: int, turn: int) -> dict[str, Any]:
    """A tree in which every number says who saved it, and when."""
    number = saver * 1_000_000 + turn
    return {f"leaf_{at}": np.full(LEAF + at, number) for at in range(N_LEAVES)} | {"number": number}


def problem_of(tree: dict[str, Any]) -> str | None:
    """Say what is wrong with a restored state; None if it is one saver's, whole."""
    number = tree.pop("number", None)
    expected = state(0, number or 0)
    del expected["number"]
    if number is None or tree.keys() != expected.keys():
        return f"has {len(tree)} leaves"
    for name, leaf in tree.items():
        if leaf.shape != expected[name].shape or not np.array_equal(leaf, expected[name]):
            return f"mixed: {name} is not of {number}"

    return None


async def import_all(folder: Path) -> None:
    """Save and restore once, so that all begin at the same time."""
    async with penstock.Checkpointer() as checkpointer:
        await (await checkpointer.save(folder / "first", state(0, 0)))
        await checkpointer.restore(folder / "first")


async def save_until(path: Path, saver: int, end: float, found: Counter[str]) -> None:
    """Overwrite the path until the end."""
    turn = 0
    form = penstock.SaveFormat(ocdbt=saver % 2 == 0)  # many files take longer to read, and to copy
    async with penstock.Checkpointer(save_format=form) as checkpointer:
        while time.time() < end:
            turn += 1
            try:
                await (await checkpointer.save(path, state(saver, turn), overwrite=True))
            except StorageError as error:
                if type(error).__name__ != "InUseError":
                    found[f"FAILED: save: {type(error).__name__}: {error}"[:160]] += 1

                found["saves refused"] += 1
                await anyio.sleep(0.001 * (saver + 1))
            except PenstockError as error:
                found[f"FAILED: save: {type(error).__name__}: {error}"[:160]] += 1
            else:
                found["saves durable"] += 1


async def read_until(path: Path, end: float, found: Counter[str]) -> None:
    """Restore the path until the end."""
    was_there = False
    async with penstock.Checkpointer() as checkpointer:
        while time.time() < end:
            try:
                problem = problem_of(await checkpointer.restore(path))
            except (NotACheckpointError, IncompleteCheckpointError) as error:
                if was_there:
                    found[f"FAILED: absent: {error}"[:160]] += 1
            except StorageError as error:
                overtaken = "while it was being read" in str(error)
                found["restores overtaken" if overtaken else f"FAILED: read: {error}"[:160]] += 1
            except PenstockError as error:
                found[f"FAILED: read: {type(error).__name__}: {error}"[:160]] += 1
            else:
                was_there = True
                found["states read, whole" if problem is None else f"FAILED: {problem}"] += 1


def copy_until(path: Path, end: float, found: Counter[str]) -> None:
    """Copy the path with `penstock cp` until the end, and look at each copy."""
    with tempfile.TemporaryDirectory(prefix="penstock-overwriters-copies-") as folder:
        copy = Path(folder) / "copy"
        while time.time() < end:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
                status = cli.main(["cp", str(path), str(copy)])
            if status == 0:
                problem = _problem_of_copy(copy)
                found["copies, whole" if problem is None else f"FAILED: copy {problem}"[:160]] += 1
                shutil.rmtree(copy)
            elif "while it was being read" in said.getvalue() or not found["copies, whole"]:
                found["copies overtaken"] += 1
            else:
                found[f"FAILED: copy: {said.getvalue()}"[:300]] += 1
            if left := os.listdir(folder):
                found[f"FAILED: a copy left {left}"[:160]] += 1
                return


def _problem_of_copy(copy: Path) -> str | None:
    try:
        return problem_of(anyio.run(penstock.restore, copy))
    except PenstockError as error:
        return str(error)


def run(folder: Path, savers: int, seconds: float) -> Counter[str]:
    """Let so many savers, a reader and a copier work for a while; return what was counted."""
    path = folder / "latest"
    command = [sys.executable, __file__, "--seconds", str(seconds), "--child", str(path)]
    children = [
        subprocess.Popen([*command, who], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for who in ("copier", *map(str, range(savers + 1)))
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()  # it has imported all

    found: Counter[str] = Counter()
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()

    for child in children:
        said, _ = child.communicate(timeout=seconds + 120)
        found.update(json.loads(said) if child.returncode == 0 else {f"FAILED: exit {child.returncode}": 1})

    try:
        problem = problem_of(anyio.run(penstock.restore, path))
    except PenstockError as error:
        problem = str(error)

    found["last states read, whole" if problem is None else f"FAILED: at the end: {problem}"] += 1
    left = sorted(name.name for name in folder.iterdir() if name != path)
    if left:
        found[f"FAILED: left behind: {left}"] += 1

    return found


class Meddler:
    """Another program: renames, removes and swaps the directory of a build, and what lies at the path.

    It never leaves at the path what cannot be restored, and removes nothing there. What it removes it first
    takes away: one that goes on removing what was published meanwhile is not what this is about.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self._path = str(path)
        self._build = f"{path}.orbax-checkpoint-tmp"
        self._choose = random.Random(seed)

    def meddle(self, elsewhere: str) -> str:
        """Do one thing; return what it was."""
        what = self._choose.choice(["rename", "remove", "swap", "swap back", "swap what is there", "away"])
        if what in {"rename", "remove"}:
            os.rename(self._build, elsewhere)
            if what == "remove":
                shutil.rmtree(elsewhere)
        elif what in {"swap", "swap back"}:
            os.mkdir(elsewhere)
            system_renameat2(elsewhere, self._build, RENAME_EXCHANGE)
            if what == "swap back":
                time.sleep(self._choose.random() * 0.005)
                system_renameat2(elsewhere, self._build, RENAME_EXCHANGE)
        elif what == "swap what is there":
            before = os.stat(self._path).st_ino
            shutil.copytree(self._path, elsewhere)
            is_whole = os.path.exists(f"{elsewhere}/commit_success.txt")
            if is_whole and os.stat(self._path).st_ino == before:
                system_renameat2(elsewhere, self._path, RENAME_EXCHANGE)
        else:
            os.rename(self._path, elsewhere)
            time.sleep(0.001)
            os.rename(elsewhere, self._path)

        return what

    def run(self, end: float, found: Counter[str]) -> None:
        """Meddle until the end."""
        while time.time() < end:
            time.sleep(self._choose.random() * 0.03)
            elsewhere = f"{self._path}-elsewhere-{self._choose.getrandbits(64):x}"
            try:
                found[f"meddled: {self.meddle(elsewhere)}"] += 1
            except OSError:
                found["meddled in vain"] += 1


async def save_meddled(path: Path, end: float, found: Counter[str]) -> None:
    """Overwrite the path until the end; restore it after each save that is durable."""
    turn = 0
    async with penstock.Checkpointer() as checkpointer:
        while time.time() < end:
            turn += 1
            try:
                await (await checkpointer.save(path, state(1, turn), overwrite=True))
            except PenstockError as error:
                found[f"saves that failed: {type(error).__name__}"] += 1
            else:
                found["saves durable"] += 1
                problem = await _problem_at(checkpointer, path)
                if problem is not None:
                    found[f"FAILED: durable, and {problem}"[:160]] += 1


async def _problem_at(checkpointer: penstock.Checkpointer, path: Path) -> str | None:
    """Say what is wrong at a path, looking again: it may be away for a moment."""
    problem: str | None = None
    for _ in range(50):
        try:
            return problem_of(await checkpointer.restore(path))
        except PenstockError as error:
            problem = str(error)
            await anyio.sleep(0.002)

    return problem


def run_meddled(folder: Path, seconds: float, seed: int) -> Counter[str]:
    """Let a saver work for a while beside a program that meddles; return what was counted."""
    path, found = folder / "latest", Counter[str]()
    with tempfile.TemporaryDirectory(prefix="penstock-overwriters-") as imported:
        anyio.run(import_all, Path(imported))

    command = [sys.executable, __file__, "--seconds", str(seconds), "--seed", str(seed), "--child", str(path)]
    meddling = subprocess.Popen(
        [*command, "meddler"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert meddling.stdout is not None
    meddling.stdout.readline()
    assert meddling.stdin is not None
    meddling.stdin.write("go\n")
    meddling.stdin.flush()
    anyio.run(save_meddled, path, time.time() + seconds, found)
    said, _ = meddling.communicate(timeout=120)
    found.update(json.loads(said) if meddling.returncode == 0 else {f"FAILED: exit {meddling.returncode}": 1})
    return found


def main() -> int:
    """Parse the command line and be the parent or a child. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--savers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--meddled", action="store_true", help="only with a program that meddles")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        path, who = Path(options.child[0]), options.child[1]
        with tempfile.TemporaryDirectory(prefix="penstock-overwriters-") as folder:
            anyio.run(import_all, Path(folder))

        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        end = time.time() + options.seconds
        found: Counter[str] = Counter()
        if who == "meddler":
            Meddler(path, options.seed).run(end, found)
        elif who == "copier":
            copy_until(path, end, found)
        elif who == "0":
            anyio.run(read_until, path, end, found)
        else:
            anyio.run(save_until, path, int(who), end, found)

        sys.stdout.write(json.dumps(found))
        return 0

    failed = False
    for savers in (*(() if options.meddled else options.savers), None):
        # In memory a save takes a few milliseconds, so that some end before the next thing is done to them.
        place = MEMORY if savers is None and os.path.isdir(MEMORY) else None
        with tempfile.TemporaryDirectory(
            prefix="penstock-overwriters-", dir=place, ignore_cleanup_errors=True
        ) as folder:
            if savers is None:
                found = run_meddled(Path(folder), options.seconds, options.seed)
            else:
                found = run(Path(folder), savers, options.seconds)

        who = "a saver, meddled with" if savers is None else f"{savers} savers"
        sys.stdout.write(f"{who}, {options.seconds:g} s\n")
        for what, times in sorted(found.items()):
            sys.stdout.write(f"{times:8} {what}\n")
            failed |= what.startswith("FAILED")

    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
