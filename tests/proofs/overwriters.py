"""Lets several processes overwrite one checkpoint at once, and reads it all the while. `make overwriters`.

Each saver saves a state in which every number is its own: the saver and its round. It saves to one path with
`overwrite=True`, again and again. One that is refused, since another is at work, tries again. A reader
restores the path all the while. It is demanded that

* every state that is read, in between and at the end, is one saver's and one round's, whole, bit for bit,
* the path is never absent, once it was there,
* nobody fails but with `InUseError`,
* nothing else lies beside it at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import penstock
from penstock.kernel.errors import IncompleteCheckpointError, NotACheckpointError, PenstockError, StorageError

N_LEAVES = 12
LEAF = 3_000


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
    async with penstock.Checkpointer() as checkpointer:
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


def run(folder: Path, savers: int, seconds: float) -> Counter[str]:
    """Let so many savers and a reader work for a while; return what was counted."""
    path = folder / "latest"
    command = [sys.executable, __file__, "--seconds", str(seconds), "--child", str(path)]
    children = [
        subprocess.Popen([*command, str(at)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for at in range(savers + 1)
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


def main() -> int:
    """Parse the command line and be the parent or a child. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--savers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        path, saver = Path(options.child[0]), int(options.child[1])
        with tempfile.TemporaryDirectory(prefix="penstock-overwriters-") as folder:
            anyio.run(import_all, Path(folder))

        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        end = time.time() + options.seconds
        found: Counter[str] = Counter()
        if saver == 0:
            anyio.run(read_until, path, end, found)
        else:
            anyio.run(save_until, path, saver, end, found)

        sys.stdout.write(json.dumps(found))
        return 0

    failed = False
    for savers in options.savers:
        with tempfile.TemporaryDirectory(prefix="penstock-overwriters-") as folder:
            found = run(Path(folder), savers, options.seconds)

        sys.stdout.write(f"{savers} savers, {options.seconds:g} s\n")
        for what, times in sorted(found.items()):
            sys.stdout.write(f"{times:8} {what}\n")
            failed |= what.startswith("FAILED")

    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
