"""The longest stall of asyncio, uvloop (if it is here) and trio beside penstock. `make stalls`.

A heartbeat wants to run every millisecond; what is told is the longest delay of each operation, beside
that of an idle second. Each loop has a process of its own. Like every figure about time it is
looked at, and not tested: run it on an idle machine. `make bench` has the same beside Orbax's.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import anyio
import jax
import jax.numpy as jnp
from tests.bench.stalls import Heartbeat, beating, noise_floor

import penstock

LOOPS: Final = ("asyncio", "uvloop", "trio")
PAUSE_S: Final = 0.2


def small() -> dict[str, Any]:
    """10,000 leaves of 1 KiB."""
    return {f"leaf_{at:05}": jnp.full(256, at, jnp.float32) for at in range(10_000)}


def large() -> dict[str, Any]:
    """1 GiB in 8 arrays."""
    return {f"leaf_{at}": jax.random.normal(jax.random.key(at), (32 * 2**20,)) for at in range(8)}


async def stall(heartbeat: Heartbeat, operation: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds that the loop stood still at most during an operation."""
    gc.collect()
    await anyio.sleep(PAUSE_S)
    heartbeat.reset()
    result = await operation()
    worst = heartbeat.worst_s()
    await anyio.sleep(PAUSE_S)
    del result  # what a tree costs to drop is its owner's affair
    return round(worst * 1e3, 1)


async def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Every operation on both trees, so many times."""
    found: dict[str, Any] = {}
    async with beating() as heartbeat:
        for name, build in (("small", small), ("large", large)):
            tree, path = build(), folder / name
            jax.block_until_ready(tree)
            like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
            worst: dict[str, list[float]] = {"idle": [], "save": [], "restore": [], "metadata": []}
            async with penstock.Checkpointer() as ckpt:

                async def save(ckpt: Any = ckpt, path: Path = path, tree: Any = tree) -> object:
                    return await (await ckpt.save(path, tree, overwrite=True))

                async def restore(ckpt: Any = ckpt, path: Path = path, like: Any = like) -> object:
                    return await ckpt.restore(path, like=like)

                async def metadata(ckpt: Any = ckpt, path: Path = path) -> object:
                    return await ckpt.metadata(path)

                for _ in range(rounds):
                    worst["idle"].append(round(await noise_floor(heartbeat) * 1e3, 1))
                    worst["save"].append(await stall(heartbeat, save))
                    worst["restore"].append(await stall(heartbeat, restore))
                    worst["metadata"].append(await stall(heartbeat, metadata))

            found[name] = worst
            del tree

    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop", choices=LOOPS)
    arguments = parser.parse_args()
    if arguments.loop is None:
        for loop in LOOPS:
            if loop in {"asyncio", "trio"} or importlib.util.find_spec(loop):
                command = [sys.executable, "-m", "tests.proofs.stalls", f"--rounds={arguments.rounds}"]
                subprocess.run([*command, f"--loop={loop}"], check=True)

        return

    folder = Path(tempfile.mkdtemp())
    try:
        backend = "trio" if arguments.loop == "trio" else "asyncio"
        options = {"use_uvloop": True} if arguments.loop == "uvloop" else {}
        found = anyio.run(measure, folder, arguments.rounds, backend=backend, backend_options=options)
    finally:
        shutil.rmtree(folder)

    for name, worst in found.items():
        sys.stdout.write(json.dumps({"loop": arguments.loop, "tree": name, "stall_ms": worst}) + "\n")


if __name__ == "__main__":
    main()
