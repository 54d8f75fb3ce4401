"""Kills processes of a job, and keepers of its hosts, at random moments. `make tiers-proof`.

Three processes on two hosts, each host a keeper, save one step after another into memory and a root. One
process is killed, or all are, or a keeper with its processes; the rest is killed then, as a launcher does.
The next job has its processes on other hosts, so that most find parts of others there, and meets what the
keepers have begun. It must find

* a step that is no older than the last one that was durable in the root,
* and, if both keepers live, no older than the last one that any process called kept,
* the same step in all processes, with the values that each of them saved as that step, and no others.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final, Literal

import numpy as np
from tests.proofs.crash_loop import LOADED
from tests.proofs.tiers import KeeperProcess, Promised, Training

from penstock import PerProcess, SaveFuture
from penstock.config import Config, JobLimits, StoreOptions
from penstock.handlers import LocalStore
from penstock.handlers.coordinators import JobCoordinator
from penstock.handlers.coordinators.store_key_values import StoreKeyValues
from penstock.handlers.stores.keeper.keeper_options import KeeperOptions
from penstock.steps import CheckpointManager, KeepLast, Memory

Victim = Literal["one", "all", "host"]
VICTIMS: Final[Sequence[Victim]] = ("one", "all", "host")
COUNT: Final = 3
SIZE: Final = 50_000
LIMITS: Final = JobLimits(join_s=60.0, silence_s=20.0, beat_s=0.5)


async def train(folder: Path, service: Path, socket: str, index: int, out: int) -> None:
    """Resume, check what was found, and save one step after another."""

    def say(what: str, step: int) -> None:
        os.write(out, f"{what} {step}\n".encode())  # one write, so that lines are in order

    def state(step: int) -> dict[str, object]:
        own = PerProcess(np.full(100 * (index + 1), 10 * step + index))
        return {"w": np.full(SIZE, step, np.float32), "n": step, "own": own}

    coordinator = JobCoordinator(StoreKeyValues(LocalStore(), str(service)), index, COUNT, LIMITS)
    config = Config(store=StoreOptions(keeper=KeeperOptions(socket=socket)))
    async with CheckpointManager(
        folder / "root", tiers=Memory(keep=2), keep=KeepLast(3), coordinator=coordinator, config=config
    ) as manager:
        latest = manager.latest_step()
        if latest is not None:
            found, expected = await manager.restore(like=state(0)), state(latest)
            assert found["n"] == latest, f"step {latest} holds step {found['n']}"
            np.testing.assert_array_equal(found["w"], expected["w"])
            np.testing.assert_array_equal(found["own"].value, expected["own"].value)  # type: ignore[attr-defined]

        say("resumed", -1 if latest is None else latest)
        for step in range((-1 if latest is None else latest) + 1, 10**9):
            save = await manager.save(step, state(step))
            assert save is not None
            save.add_done_callback(partial(_say_durable, say, step))
            await save.kept()
            say("kept", step)


def _say_durable(say: Callable[[str, int], None], step: int, done: SaveFuture) -> None:
    if done.exception() is None:
        say("durable", step)


def one_round(
    folder: Path, number: int, keepers: Sequence[KeeperProcess], rng: random.Random, promised: Promised
) -> Victim:
    """Let a job resume and save, and kill; return who was killed first.

    Args:
        folder: Of all jobs.
        number: Of this one.
        keepers: Of the hosts.
        rng: Chooses.
        promised: Of the jobs before; changed to what holds for the next one.
    """
    for keeper in keepers:
        keeper.start()

    victim, hosts = rng.choice(VICTIMS), [0, 1, rng.randrange(2)]
    rng.shuffle(hosts)
    service = folder / f"service{number}"
    jobs = [
        Training(partial(train, folder, service, keepers[host].socket, index))
        for index, host in enumerate(hosts)
    ]
    dead: set[int] = set()

    def kill(index: int) -> None:
        if index not in dead:
            dead.add(index)
            jobs[index].kill()

    try:
        for job in jobs:
            job.hear(1)

        (resumed,) = {job.last["resumed"] for job in jobs}
        assert resumed >= max(promised.durable, promised.kept), f"{resumed} was found after {promised}"
        jobs[rng.randrange(COUNT)].hear(rng.randrange(1, 12))
        time.sleep(rng.random() * 0.1)  # the moment of the kill is what is random here
        if victim == "one":
            kill(rng.randrange(COUNT))
            time.sleep(rng.random())
        elif victim == "host":
            keepers[hosts[0]].kill()
            for index in [index for index, host in enumerate(hosts) if host == hosts[0]]:
                kill(index)
    finally:
        for index in range(COUNT):
            kill(index)

    promised.durable = max(promised.durable, *[job.last.get("durable", -1) for job in jobs])
    kept = max(resumed, *[job.last.get("kept", -1) for job in jobs])
    promised.kept = -1 if victim == "host" else kept
    return victim


def main(given: Sequence[str] | None = None) -> int:
    """Run all rounds; return 0, or raise at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(given)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    rng, counts, promised = random.Random(seed), Counter[str](), Promised()
    for name in LOADED:
        import_module(name)

    with tempfile.TemporaryDirectory(prefix="pk-", dir="/tmp", ignore_cleanup_errors=True) as made:
        keepers = [KeeperProcess(Path(made), name) for name in ("k0", "k1")]
        try:
            for number in range(options.kills):
                counts[one_round(Path(made), number, keepers, rng, promised)] += 1
        finally:
            for keeper in keepers:
                keeper.kill()

    for who, n in sorted(counts.items()):
        sys.stdout.write(f"{n} kills: {who}\n")

    sys.stdout.write(f"seed {seed}; in the end {promised}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
