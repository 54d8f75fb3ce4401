"""What a tier in memory costs a training, beside a copy in memory: `python -m tests.bench.tiers`.

Milliseconds of wall and of the training's processor, in one process, by turns. The keeper is one of its own,
started for this and killed in the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import anyio
import jax
import numpy as np

from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.keeper.process import arguments
from penstock.kernel.errors import KeeperLostError
from penstock.steps import CheckpointManager, Memory, Never

MIB: Final = 2**20
ROUNDS: Final = 5


def large() -> dict[str, Any]:
    """512 MiB in 8 arrays."""
    return {f"w{number}": jax.numpy.full((16 * MIB,), number, "float32") for number in range(8)}


def small() -> dict[str, Any]:
    """4,000 leaves of 1 KiB."""
    return {f"w{number}": jax.numpy.full((256,), number, "float32") for number in range(4000)}


class Timed:
    """Wall and processor seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def taken(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._processor


def memcpy() -> tuple[float, float]:
    """Copy 512 MiB into memory that was used before."""
    source, target = np.ones(512 * MIB, np.uint8), np.zeros(512 * MIB, np.uint8)
    timed = Timed()
    np.copyto(target, source)
    return timed.taken()


def shown(name: str, rounds: list[tuple[float, float]]) -> None:
    """Print the first, and the median of the others."""
    first, others = rounds[0], rounds[1:] or rounds
    wall, processor = (1000 * median(each[at] for each in others) for at in (0, 1))
    sys.stdout.write(f"{name:44} {wall:8.1f} {processor:8.1f}   first {1000 * first[0]:8.1f}\n")
    sys.stdout.flush()


async def saves(root: Path, make: Callable[[], Mapping[str, Any]], name: str) -> None:
    """Save one tree after another into memory alone, and restore the last."""
    staged: list[tuple[float, float]] = []
    kept: list[tuple[float, float]] = []
    copied: list[tuple[float, float]] = []
    restored: list[tuple[float, float]] = []
    async with CheckpointManager(root, tiers=Memory(keep=2), save_when=Never()) as manager:
        for step in range(ROUNDS + 1):
            state = make()
            cast("Any", jax).block_until_ready(state)
            copied.append(memcpy())
            timed = Timed()
            save = await manager.save(step, state)
            assert save is not None
            staged.append(timed.taken())
            await save.kept()
            kept.append(timed.taken())
            del state
            restore: Awaitable[Any] = manager.restore(mmap=True, verify=True)
            timed = Timed()
            found = await restore
            restored.append(timed.taken())
            del found
            await manager.wait()

    sys.stdout.write(f"{name:44} {'wall':>8} {'proc.':>8}\n")
    shown("memcpy of 512 MiB into used memory", copied)
    shown("staged", staged)
    shown("kept", kept)
    shown("restored: mapped and verified", restored)


def main() -> int:
    """Measure, and print a table."""
    folder = Path(tempfile.mkdtemp(prefix="pk-", dir="/tmp"))
    socket = str(folder / "keeper")
    os.environ["PENSTOCK_STORE__KEEPER__SOCKET"] = socket
    given = arguments(socket, 6 * 2**30, float("inf"), detached=False)
    keeper = subprocess.Popen([sys.executable, "-m", "penstock.keeper", *given])
    try:
        while True:
            try:
                KeeperStore(socket).status()
                break
            except KeeperLostError:
                os.sched_yield()

        anyio.run(saves, folder / "large", large, "512 MiB in 8 arrays")
        anyio.run(saves, folder / "small", small, "4,000 leaves of 1 KiB")
    finally:
        keeper.kill()
        keeper.wait()
        shutil.rmtree(folder)

    return 0


if __name__ == "__main__":
    sys.exit(main())
