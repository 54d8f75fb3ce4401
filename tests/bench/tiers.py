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
from tests.object_server import BUCKET, CREDENTIALS

from penstock.config import Config
from penstock.handlers import ArrayHandler, default_handlers
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
    source, target = np.ones(512 * MIB, np.uint8), np.empty(512 * MIB, np.uint8)
    target.fill(0)  # `np.zeros` would have no pages yet, and the copy would wait for them
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


SLOW_SERVER: Final = """
import sys, time
from threading import Lock
from tests.object_server import InMemory, object_server

class Throttled(InMemory):
    lock = Lock()

    def put(self, key, data):
        with self.lock:
            time.sleep(len(data) / 100e6)
        return super().put(key, data)

with object_server(Throttled()) as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""
"""A bucket that takes 100 MB/s, in a process of its own, until its stdin ends."""


async def saves_beside_a_slow_root(endpoint: str) -> None:
    """Save 1 GiB again and again with a budget of 256 MiB, all of it copied, as from an accelerator."""
    registry, copying = default_handlers(), ArrayHandler(alias_host=False)
    for type_ in (jax.Array, jax.ShapeDtypeStruct, cast("Any", jax).core.Tracer):
        registry.register(type_, copying, override=True)

    given = {"store": {"s3": {"endpoint": endpoint}}, "memory": {"limit_bytes": 256 * MIB}}
    config = Config.load(arguments=given)
    held_up: list[tuple[float, float]] = []
    kept: list[tuple[float, float]] = []
    with anyio.CancelScope() as scope:
        opened = CheckpointManager(f"s3://{BUCKET}/run", tiers="memory", config=config, registry=registry)
        async with opened as manager:
            for step in range(ROUNDS):
                state = {f"w{number}": jax.numpy.full((64 * MIB,), step, "float32") for number in range(4)}
                cast("Any", jax).block_until_ready(state)
                timed = Timed()
                save = await manager.save(step, state)
                assert save is not None
                held_up.append(timed.taken())
                await save.kept()
                kept.append(timed.taken())

            scope.cancel()  # the copies to the bucket would take ten seconds each

    name = "1 GiB, budget 256 MiB, a bucket of 100 MB/s"
    sys.stdout.write(f"{name:44} {'wall':>8} {'proc.':>8}\n")
    shown("the loop held up, until staged", held_up)
    shown("kept", kept)


def main() -> int:
    """Measure, and print a table."""
    folder = Path(tempfile.mkdtemp(prefix="pk-", dir="/tmp"))
    socket = str(folder / "keeper")
    os.environ["PENSTOCK_STORE__KEEPER__SOCKET"] = socket
    given = arguments(socket, 6 * 2**30, float("inf"), detached=False)
    keeper = subprocess.Popen([sys.executable, "-m", "penstock.keeper", *given])
    os.environ |= CREDENTIALS
    bucket = subprocess.Popen(
        [sys.executable, "-c", SLOW_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        while True:
            try:
                KeeperStore(socket).status()
                break
            except KeeperLostError:
                os.sched_yield()

        anyio.run(saves, folder / "large", large, "512 MiB in 8 arrays")
        anyio.run(saves, folder / "small", small, "4,000 leaves of 1 KiB")
        assert bucket.stdout is not None
        anyio.run(saves_beside_a_slow_root, bucket.stdout.readline().strip())
    finally:
        for process in (keeper, bucket):
            process.kill()
            process.wait()

        shutil.rmtree(folder)

    return 0


if __name__ == "__main__":
    sys.exit(main())
