"""Kills a process that saves, again and again, and looks at what it left. `make crash`.

The child saves a state of one number under a new name and over an old name, in turn, and says so on
its standard output whenever a save is durable. The parent kills it (SIGKILL) at a random moment and
then demands that

* every save that was reported durable is there and holds its own state,
* whatever is visible under its own name is whole and holds one state, never a mixture,
* the checkpoint that is being overwritten is there, as new as the last that was reported, or newer.

Every round begins from what the one before left, so leftovers of a kill must not hinder the next.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import penstock

N_LEAVES = 40
LEAF = 30_000  # float64 numbers, so a state is some 10 MB
KEPT = 3


def state(step: int) -> dict[str, Any]:
    """A tree in which every number is `step`."""
    return {f"leaf_{at}": np.full(LEAF, float(step)) for at in range(N_LEAVES)} | {"step": step}


async def save_for_ever(folder: Path) -> None:
    """The child: report, save, report, until killed."""
    step = max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
    async with penstock.Checkpointer() as checkpointer:
        while True:
            step += 1
            save = await checkpointer.save(folder / str(step), state(step))
            say(f"begun {step}")
            await save
            say(f"durable {step}")
            await (await checkpointer.save(folder / "latest", state(step), overwrite=True))
            say(f"overwritten {step}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def kill_at_random(folder: Path, rng: random.Random) -> list[str]:
    """Run a child for a while, and return the lines it had time for."""
    command = [sys.executable, __file__, "--child", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline().strip() for _ in range(rng.randrange(1, 7))]
        with suppress(subprocess.TimeoutExpired):
            child.wait(rng.random() * 0.1)  # the moment of the kill is what is random here

        child.kill()
        return lines + child.stdout.read().split("\n")


async def step_in(path: Path) -> int:
    """Restore a checkpoint, check that it holds one state, and return which."""
    tree = await penstock.restore(path)
    step = tree.pop("step")
    assert len(tree) == N_LEAVES, f"{path} has {len(tree)} leaves"
    for name, leaf in tree.items():
        assert leaf.shape == (LEAF,), f"{name} of {path} has shape {leaf.shape}"
        assert np.all(leaf == step), f"{name} of {path} is not of step {step}"

    return int(step)


def last(lines: list[str], word: str) -> int:
    """The last step that was reported with `word`; 0 if none was."""
    return max((int(line.split()[1]) for line in lines if line.startswith(f"{word} ")), default=0)


def examine(folder: Path, lines: list[str], overwritten: int, found: Counter[str]) -> int:
    """Check all that the child left; return the last step known to be under `latest`."""
    names = sorted(path.name for path in folder.iterdir())
    found["kills that left a temporary directory"] += any("-tmp" in name for name in names)
    for name in names:
        if name.isdigit():
            assert anyio.run(step_in, folder / name) == int(name)
            found["checkpoints restored"] += 1

    durable = last(lines, "durable")
    if durable:
        assert str(durable) in names, f"step {durable} was durable, and is gone: {names}"

    overwritten = max(overwritten, last(lines, "overwritten"))
    if overwritten:
        step = anyio.run(step_in, folder / "latest")
        assert step >= overwritten, f"`latest` is of step {step}, and {overwritten} was durable"
        found["overwritten checkpoints restored"] += 1
        found["overwritten ones newer than reported"] += step > overwritten

    # By the parent: a removal that is killed half-way leaves half a checkpoint under its name.
    for name in sorted(filter(str.isdigit, names), key=int)[:-KEPT]:
        shutil.rmtree(folder / name)

    found["kills in the middle of a save"] += last(lines, "begun") != last(lines, "overwritten")
    return overwritten


def main() -> None:
    """Parse the command line and run the one side or the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        anyio.run(save_for_ever, options.child)

    say(f"seed {options.seed}")
    rng = random.Random(options.seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="penstock-crash-") as folder:
        overwritten = 0
        for kill in range(options.kills):
            lines = kill_at_random(Path(folder), rng)
            overwritten = examine(Path(folder), lines, overwritten, found)
            if (kill + 1) % 10 == 0:
                say(f"{kill + 1} kills survived")

    for what, times in sorted(found.items()):
        say(f"{times:6} {what}")


if __name__ == "__main__":
    main()
