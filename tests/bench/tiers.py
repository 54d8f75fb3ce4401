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
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias, cast

import anyio
import anyio.lowlevel
import jax
import numpy as np
from tests.object_server import BUCKET, CREDENTIALS

from penstock import SaveFormat
from penstock.config import Config
from penstock.handlers import ArrayHandler, default_handlers
from penstock.handlers.stores.keeper.keeper_store import KeeperStore
from penstock.keeper.process import arguments
from penstock.kernel.errors import KeeperLostError
from penstock.steps import CheckpointManager, Memory, Never
from penstock.telemetry import Promotion

MIB: Final = 2**20
ROUNDS: Final = 16
SETTLED: Final = 6
"""Saves after which this process has mapped all pages that it writes: it maps those that it writes the second
time. With two steps that are kept, and one that is saved, each is written twice by then."""
SLOW_ROUNDS: Final = 28
SLOW_SETTLED: Final = 12
"""The same where a step stays in the keeper as long as a slow bucket takes it, too."""


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


def memcpy(piece_bytes: int = 512 * MIB) -> tuple[float, float]:
    """Copy 512 MiB into memory that was used before.

    From 200 MiB or so on the C library copies past the caches, in half the time. No save copies as much at
    once.

    Args:
        piece_bytes: So much by one call.
    """
    source, target = np.ones(512 * MIB, np.uint8), np.empty(512 * MIB, np.uint8)
    target.fill(0)  # `np.zeros` would have no pages yet, and the copy would wait for them
    timed = Timed()
    for start in range(0, 512 * MIB, piece_bytes):
        np.copyto(target[start : start + piece_bytes], source[start : start + piece_bytes])

    return timed.taken()


Rounds: TypeAlias = list[tuple[float, float]]
WALL: Final = 0
PROCESSOR: Final = 1


def later(rounds: Rounds, of: int = WALL, settled: int = SETTLED) -> float:
    """Return the median of those after the first few, in milliseconds."""
    return 1000 * median(each[of] for each in rounds[settled:])


def shown(name: str, rounds: Rounds, settled: int = SETTLED) -> None:
    """Print the median of those after the first few, then the first, and the median of those between."""
    wall, processor = later(rounds, WALL, settled), later(rounds, PROCESSOR, settled)
    between = 1000 * median(each[WALL] for each in rounds[1:settled])
    first = f"first {1000 * rounds[0][WALL]:8.1f}   to number {settled} {between:8.1f}"
    sys.stdout.write(f"{name:52} {wall:8.1f} {processor:8.1f}   {first}\n")
    sys.stdout.flush()


def compared(name: str, found: float, bar: float) -> None:
    """Print a figure with its bar."""
    sys.stdout.write(f"  {name:50} {found:8.2f}   bar {bar:g}{'' if found <= bar else ', missed'}\n")
    sys.stdout.flush()


def titled(name: str) -> None:
    """Print the head of a table."""
    sys.stdout.write(f"{name:52} {'wall':>8} {'proc.':>8}\n")


async def saves(
    root: Path, make: Callable[[], Mapping[str, Any]], name: str, *, step_bytes: int | None = None
) -> None:
    """Save one tree after another into memory alone, and restore the last.

    Args:
        root: Where they go next.
        make: Makes a tree.
        name: Of the table.
        step_bytes: Pages that are there before the first save; None for none.
    """
    staged, kept, copied, pieces, restored = Rounds(), Rounds(), Rounds(), Rounds(), Rounds()
    tier = Memory(keep=2) if step_bytes is None else Memory(keep=2, step_bytes=step_bytes)
    async with CheckpointManager(root, tiers=tier, save_when=Never()) as manager:
        while KeeperStore(os.environ["PENSTOCK_STORE__KEEPER__SOCKET"]).status().pool_bytes < (
            step_bytes or 0
        ):
            await anyio.lowlevel.checkpoint()  # a training compiles meanwhile

        for step in range(ROUNDS):
            state = make()
            cast("Any", jax).block_until_ready(state)
            copied.append(memcpy())
            pieces.append(memcpy(16 * MIB))
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

    titled(name)
    shown("memcpy of 512 MiB into used memory", copied)
    shown("memcpy of 512 MiB, by 16 MiB", pieces)
    shown("staged", staged)
    shown("kept", kept)
    shown("restored: mapped and verified", restored)
    if make is large:
        memcpy_ms = later(copied)
        compared("staged, ms", later(staged), 1.5)
        compared("processor of kept, ms", later(kept, PROCESSOR), 150)
        compared("kept / memcpy", later(kept) / memcpy_ms, 1.5)
        compared("kept / memcpy by 16 MiB", later(kept) / later(pieces), 1.5)
        compared("the first kept / later ones", 1000 * kept[0][WALL] / later(kept), 1.5)
        compared("restored / memcpy", later(restored) / memcpy_ms, 1)
    else:
        compared("kept / staged", later(kept) / later(staged), 1.2)


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
    held_up, kept = Rounds(), Rounds()
    with anyio.CancelScope() as scope:
        opened = CheckpointManager(f"s3://{BUCKET}/run", tiers="memory", config=config, registry=registry)
        async with opened as manager:
            for step in range(SLOW_ROUNDS):
                state = {f"w{number}": jax.numpy.full((64 * MIB,), step, "float32") for number in range(4)}
                cast("Any", jax).block_until_ready(state)
                timed = Timed()
                save = await manager.save(step, state)
                assert save is not None
                held_up.append(timed.taken())
                await save.kept()
                kept.append(timed.taken())

            scope.cancel()  # the copies to the bucket would take ten seconds each

    titled("1 GiB, budget 256 MiB, a bucket of 100 MB/s")
    shown("the loop held up, until staged", held_up, SLOW_SETTLED)
    shown("kept", kept, SLOW_SETTLED)
    compared("the loop held up, ms", later(held_up, WALL, SLOW_SETTLED), 400)


class Brought:
    """An observer that adds up what the processes that encode have taken."""

    def __init__(self) -> None:
        self.processor_s = 0.0

    def observing(self, kind: str, path: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def watching(self, statistics: object) -> AbstractContextManager[Any]:
        return nullcontext()

    def promoted(self, promotion: Promotion, /) -> None:
        self.processor_s += promotion.processor_s or 0.0


async def saves_with_a_codec(folder: Path) -> None:
    """Save 128 MiB with and without zstd, with and without a tier, until they are in the root."""
    plain, zstd = SaveFormat(), SaveFormat(codec="zstd:1")
    kinds: dict[str, tuple[SaveFormat, tuple[Memory, ...]]] = {
        "plain": (plain, ()),
        "zstd": (zstd, ()),
        "plain, through memory": (plain, (Memory(),)),
        "zstd, through memory": (zstd, (Memory(),)),
    }
    taken = {name: (Rounds(), Rounds()) for name in kinds}  # until kept, and until it is in the root
    brought = Brought()
    for number, (name, (form, tiers)) in enumerate(kinds.items()):
        root = folder / f"codec{number}"
        opened = CheckpointManager(root, tiers=tiers, save_format=form, keep=2, observers=[brought])
        async with opened as manager:  # one at a time: an open one has a little to do, too
            for step in range(ROUNDS):
                state = {
                    f"w{number}": jax.numpy.arange(4 * MIB, dtype="float32") * (step + 1.5)
                    for number in range(8)
                }
                cast("Any", jax).block_until_ready(state)
                timed = Timed()
                save = await manager.save(step, state)
                assert save is not None
                await save.kept()
                taken[name][0].append(timed.taken())
                await save
                taken[name][1].append(timed.taken())
                await manager.wait()

    titled("128 MiB in 8 arrays, with and without zstd:1")
    for name, (kept, durable) in taken.items():
        shown(f"{name}: kept", kept)
        shown(f"{name}: in the root", durable)

    own = {name: later(durable, PROCESSOR) for name, (_, durable) in taken.items()}
    late = own["zstd, through memory"]
    sys.stdout.write(f"processor of what encodes, for each: {1000 * brought.processor_s / ROUNDS:.1f}\n")
    compared("zstd / plain, both through memory: processor", late / own["plain, through memory"], 1.1)
    compared("zstd through memory / plain without: processor", late / own["plain"], 1.1)


@contextmanager
def keeper(folder: Path) -> Generator[None]:
    """Run a keeper, which is the one of this process."""
    socket = str(folder / "keeper")
    os.environ["PENSTOCK_STORE__KEEPER__SOCKET"] = socket
    given = arguments(socket, 6 * 2**30, float("inf"), detached=False)
    process = subprocess.Popen([sys.executable, "-m", "penstock.keeper", *given])
    try:
        while True:
            try:
                KeeperStore(socket).status()
                break
            except KeeperLostError:
                os.sched_yield()

        yield
    finally:
        process.kill()
        process.wait()


def main() -> int:
    """Measure, and print a table."""
    folder = Path(tempfile.mkdtemp(prefix="pk-", dir="/tmp"))
    os.environ |= CREDENTIALS
    bucket = subprocess.Popen(
        [sys.executable, "-c", SLOW_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    ready = partial(saves, step_bytes=512 * MIB)
    try:
        assert bucket.stdout is not None
        endpoint = bucket.stdout.readline().strip()
        with keeper(folder):
            anyio.run(saves, folder / "large", large, "512 MiB in 8 arrays, no pages ready")
        with keeper(folder):
            anyio.run(ready, folder / "ready", large, "512 MiB in 8 arrays, pages ready")
        with keeper(folder):
            anyio.run(saves, folder / "small", small, "4,000 leaves of 1 KiB")
        with keeper(folder):
            anyio.run(saves_with_a_codec, folder)
        with keeper(folder):
            anyio.run(saves_beside_a_slow_root, endpoint)
    finally:
        bucket.kill()
        bucket.wait()
        shutil.rmtree(folder)

    return 0


if __name__ == "__main__":
    sys.exit(main())
