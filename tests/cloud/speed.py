"""How fast a save to and a restore from a bucket are, beside a loop of PUTs and GETs written by hand.

    python -m tests.cloud.speed [--mib 256] [--rounds 3]

Both send and get the same bytes, in objects of the same size and as many at once, through obstore, to and
from SeaweedFS on this machine, over clients that are connected. Each round does both, one after the other;
the table has the medians. CPU time is that of this process alone, without the server's.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax.numpy as jnp
import numpy as np
from crc32c import crc32c
from tests.cloud.servers import Server, seaweedfs

import penstock
import penstock.sync
from penstock.handlers.stores.buckets import S3Options

FILE_BYTES = S3Options().file_bytes
AT_ONCE = S3Options().concurrency
MIB = 2**20


@dataclass(frozen=True)
class Taken:
    """What one run took."""

    wall_s: float
    cpu_s: float


def timed(work: Callable[[], Any]) -> Taken:
    before, start = resource.getrusage(resource.RUSAGE_SELF), perf_counter()
    work()
    wall_s, after = perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return Taken(wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def by_hand(
    server: Server, prefix: str, arrays: Sequence[np.ndarray[Any, Any]], *, summed: bool
) -> tuple[Taken, Taken]:
    """Put the bytes of all arrays as objects, and get them into fresh arrays.

    If `summed`, with the checksums that penstock computes: one that the server compares, and a crc32c of what
    is sent and of what comes back.
    """
    obstore: Any = import_module("obstore")
    store = server.connect()(import_module("obstore.store")) if summed else server.store()
    parts = [
        (f"{prefix}/{number}-{at}", array.view(np.uint8).reshape(-1)[at : at + FILE_BYTES])
        for number, array in enumerate(arrays)
        for at in range(0, array.nbytes, FILE_BYTES)
    ]

    def put(part: tuple[str, Any]) -> None:
        if summed:
            crc32c(part[1].data)

        obstore.put(store, part[0], part[1].data, use_multipart=False)

    def get(part: tuple[str, Any]) -> np.ndarray[Any, Any]:
        found = obstore.get(store, part[0]).bytes()
        taken = np.empty(len(found), np.uint8)
        taken[:] = np.frombuffer(found, np.uint8)
        if summed:
            crc32c(taken.data)

        return taken  # kept until all are there, as a restore keeps what it made

    obstore.put(store, f"{prefix}/connected", b"")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return timed(lambda: list(pool.map(put, parts))), timed(lambda: list(pool.map(get, parts)))


def by_penstock(path: str, tree: Any) -> tuple[Taken, Taken]:
    """Save and restore a tree by a checkpointer that is open, as a training loop has one."""
    with penstock.sync.Checkpointer() as checkpointer:
        checkpointer.save(f"{path}-connected", {"step": 1}).result()
        return (
            timed(lambda: checkpointer.save(path, tree).result()),
            timed(lambda: checkpointer.restore(path, like=tree)),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    each = options.mib * MIB // 8 // 4
    arrays = [generator.standard_normal(each, np.float32).reshape(-1, 1024) for _ in range(8)]
    # Arrays of jax, which nobody can change: those of numpy would be copied before they are written.
    tree = {f"w{number}": jnp.asarray(array) for number, array in enumerate(arrays)}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    rows: dict[str, list[Taken]] = {}
    with tempfile.TemporaryDirectory(dir=memory) as folder, seaweedfs(Path(folder)) as server:
        os.environ.update(server.environ())
        for number in range(options.rounds + 1):  # the first one warms up
            found = {
                "by hand": by_hand(server, f"hand/{number}", arrays, summed=False),
                "by hand, summed": by_hand(server, f"summed/{number}", arrays, summed=True),
            }
            found["penstock"] = by_penstock(f"s3://bucket/run/{number}", tree)
            for who, taken in found.items() if number else ():
                for what, one in zip(("put", "get"), taken, strict=True):
                    rows.setdefault(f"{what}, {who}", []).append(one)

    gib = options.mib / 1024
    sys.stdout.write(f"{'':28s} {'MiB/s':>8s} {'CPU s/GiB':>10s}" + "\n")
    for row, measured in sorted(rows.items(), reverse=True):
        wall_s, cpu_s = median(one.wall_s for one in measured), median(one.cpu_s for one in measured)
        sys.stdout.write(f"{row:28s} {options.mib / wall_s:8.0f} {cpu_s / gib:10.2f}" + "\n")


if __name__ == "__main__":
    main()
