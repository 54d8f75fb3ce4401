"""One process of a job that saves again and again, while `tests.proofs.pauses` stops it or another one."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

LEAVE_S = 20.0


def main() -> None:
    rank, count = map(int, sys.argv[1:3])
    port, folder, limits = sys.argv[3:]
    jax: Any = import_module("jax")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, coordinator_bind_address=f"127.0.0.1:{port}")
    import anyio

    anyio.run(_save_again_and_again, rank, count, Path(folder), json.loads(limits))
    (Path(folder) / f"over.{rank}").touch()
    if rank == 0:  # the service goes with it
        end = time.monotonic() + LEAVE_S
        while time.monotonic() < end and not all(
            (Path(folder) / f"over.{other}").exists() for other in range(count)
        ):
            time.sleep(0.05)

    os._exit(0)  # whatever became of the others


async def _save_again_and_again(rank: int, count: int, folder: Path, limits: dict[str, float]) -> None:
    """Save one step after another, until a file names the last; write down what came of each."""
    from tests.proofs.process_kills import tree_of

    import penstock
    from penstock.config import Config, JobLimits

    tree, step, last = tree_of(count), 0, folder / "last"
    with (folder / f"saves.{rank}").open("a", buffering=1) as saves:
        async with penstock.Checkpointer(config=Config(processes=JobLimits(**limits))) as checkpointer:
            while not last.exists() or step < int(last.read_text()):
                step += 1
                came: dict[str, Any] = {"step": step, "came": "saved", "began": time.time()}
                try:
                    await (await checkpointer.save(folder / "run" / f"step_{step}", tree))
                except penstock.errors.PenstockError as error:
                    came["came"] = type(error).__name__
                    came["processes"] = list(getattr(error, "processes", ()))
                    came["text"] = str(error)

                saves.write(json.dumps({**came, "ended": time.time()}) + "\n")


if __name__ == "__main__":
    main()
