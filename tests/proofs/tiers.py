"""Kills trainings and their keeper at random moments, and looks at what they resume from. `make tiers-proof`.

A training saves one step after another into memory, a disk and a root, and says which were begun, kept and
durable. It is killed, or its keeper is, or both. The next one must find

* a step that is no older than the last one that was durable in the root,
* and, if the keeper lives, no older than the last one that was kept: one step is lost, that being saved,
* with every value that was saved as that step, and no other.

No save fails because its keeper is killed: the training overwrites the state as soon as it is staged, and the
step comes to the disk all the same.

Trainings are forked from this process, which has imported everything and runs no thread.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final, Literal

import anyio
import numpy as np
from tests.proofs.crash_loop import LOADED, fork

from penstock import SaveFuture
from penstock.errors import StorageError
from penstock.keeper.process import arguments
from penstock.steps import CheckpointManager, Disk, KeepLast, Memory

Victim = Literal["training", "keeper", "both"]
VICTIMS: Final[Sequence[Victim]] = ("training", "keeper", "both")
SAYS_S: Final = 60.0
"""Seconds in which a training must say something."""

SIZE: Final = 200_000


async def train(folder: Path, out: int) -> None:
    """Resume, check what was found, and save one step after another."""

    def say(what: str, step: int) -> None:
        os.write(out, f"{what} {step}\n".encode())  # one write, so that lines are in order

    tiers: list[Memory | Disk] = [Memory(keep=2), Disk(folder / "disk", keep=2)]
    async with CheckpointManager(folder / "root", tiers=tiers, keep=KeepLast(3)) as manager:
        latest = manager.latest_step()
        if latest is not None:
            found = await manager.restore()
            assert found["n"] == latest, f"step {latest} holds step {found['n']}"
            assert (found["w"] == np.float32(latest)).all(), f"step {latest} is a mixture"

        say("resumed", -1 if latest is None else latest)
        for step in range((-1 if latest is None else latest) + 1, 10**9):
            say("begun", step)
            values = np.full(SIZE, step, np.float32)
            save = await manager.save(step, {"w": values, "n": step})
            assert save is not None
            values[:] = -1  # as a training does that donates its state
            save.add_done_callback(partial(_say_durable, say, step))
            try:
                await save.kept()
            except StorageError:
                say("failed", step)
            else:
                say("kept", step)


def _say_durable(say: Callable[[str, int], None], step: int, done: SaveFuture) -> None:
    if done.exception() is None:
        say("durable", step)


class Training:
    """A training in another process, and what it has said.

    Args:
        train: What it does, and says to the descriptor that it gets.
    """

    def __init__(self, train: Callable[[int], Awaitable[None]]) -> None:
        self._read, out = os.pipe()
        self._text = b""
        self.process = fork(lambda out: anyio.run(train, out), out)
        os.close(out)
        self.last: dict[str, int] = {}  #: the latest step of each kind
        self.n_failed = 0

    def hear(self, n_more: int) -> None:
        """Return when it has said so many more lines.

        Raises:
            AssertionError: If it says nothing for long, or has ended.
        """
        wanted = self._text.count(b"\n") + n_more
        while self._text.count(b"\n") < wanted:
            assert self._take(), f"a training ended by itself: {self._text.decode()}"

    def kill(self) -> None:
        """Kill it, and read what it said."""
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        while self._take():
            pass

        os.close(self._read)

    def _take(self) -> bool:
        ready, _, _ = select.select([self._read], [], [], SAYS_S)
        assert ready, f"nothing was said for {SAYS_S} s: {self._text.decode()}"
        found = os.read(self._read, 65536)
        self._text += found
        lines = [line.split() for line in self._text.decode().splitlines()]
        self.last = {what: max(int(n) for each, n in lines if each == what) for what, _ in lines}
        self.n_failed = sum(what == "failed" for what, _ in lines)

        return bool(found)


class KeeperProcess:
    """The keeper of all trainings on a host; started again when it was killed."""

    def __init__(self, folder: Path, name: str = "keeper") -> None:
        self.socket = str(folder / name)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is None:
            given = arguments(self.socket, 2**28, float("inf"), detached=False)
            self._process = subprocess.Popen([sys.executable, "-m", "penstock.keeper", *given])

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@dataclass(slots=True)
class Promised:
    """The steps that the next training must find at least; -1 for none."""

    durable: int = -1  #: in the root
    kept: int = -1  #: in a keeper that lives


def one_round(folder: Path, keeper: KeeperProcess, rng: random.Random, promised: Promised) -> Victim:
    """Let a training resume and save, and kill somebody; return who.

    Args:
        folder: Of all trainings.
        keeper: Theirs.
        rng: Chooses.
        promised: Of the trainings before; changed to what holds for the next one.
    """
    keeper.start()
    training, victim = Training(partial(train, folder)), rng.choice(VICTIMS)
    try:
        training.hear(1)
        resumed = training.last["resumed"]
        assert resumed >= max(promised.durable, promised.kept), f"{resumed} was found after {promised}"
        training.hear(rng.randrange(1, 30))
        time.sleep(rng.random() * 0.05)  # the moment of the kill is what is random here
        if victim != "training":
            keeper.kill()
        if victim == "keeper":
            training.hear(rng.randrange(4, 20))  # it goes on without
    finally:
        training.kill()

    assert not training.n_failed, f"{training.n_failed} saves failed when this was killed: {victim}"
    promised.durable = max(promised.durable, training.last.get("durable", -1))
    promised.kept = max(resumed, training.last.get("kept", -1)) if victim == "training" else -1
    return victim


def main(given: Sequence[str] | None = None) -> int:
    """Run all rounds; return 0, or raise at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(given)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    rng, counts, promised = random.Random(seed), Counter[str](), Promised()
    for name in LOADED:
        import_module(name)

    with tempfile.TemporaryDirectory(prefix="pk-", dir="/tmp") as made:
        keeper = KeeperProcess(Path(made))
        os.environ["PENSTOCK_STORE__KEEPER__SOCKET"] = keeper.socket
        try:
            for _ in range(options.kills):
                counts[one_round(Path(made), keeper, rng, promised)] += 1
        finally:
            keeper.kill()

    for who, n in sorted(counts.items()):
        sys.stdout.write(f"{n} kills: {who}; no save failed\n")

    sys.stdout.write(f"seed {seed}; in the end {promised}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
