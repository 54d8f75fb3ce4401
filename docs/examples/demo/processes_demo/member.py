"""One process of the job: trains a model that is sharded over all of them, and saves it with them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio

import penstock
from penstock.config import JobLimits
from penstock.handlers import LocalStore
from penstock.steps import EverySteps
from penstock.testing import FaultyStore

LIMITS = JobLimits(silence_s=4.0, beat_s=0.5, call_s=3.0)
STEPS, EVERY, KILLED_AT = 8, 2, 6
WIDTH, BATCH = 256, 32


def main() -> None:
    """Take the arguments that `start` gives: which process this is, of how many, and what it is to do."""
    rank, count = map(int, sys.argv[1:3])
    port, root, killed = sys.argv[3:]
    jax: Any = import_module("jax")
    jax.config.update("jax_enable_recoverability", True)  # else jax ends the others
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, count, rank, coordinator_bind_address=address)
    result = anyio.run(train, Path(root), rank, killed == str(rank))
    sys.stdout.write(f"{json.dumps(result)}\n")
    sys.stdout.flush()
    client: Any = import_module("jax._src.distributed").global_state.client
    if not killed:
        client.wait_at_barrier("end", 30_000)  # the service lives in process 0
    elif rank == 0:
        time.sleep(2.0)  # so that the others have said what they heard

    os._exit(0)


async def train(root: Path, rank: int, is_killed: bool) -> dict[str, Any]:
    """Train from the latest step, or from the beginning; return the losses, or who ended the job."""
    from processes_demo.model import digest, init, make_mesh, make_step  # it asks jax for the devices

    mesh = make_mesh()
    state, step_once = init(mesh), make_step(mesh)
    store = FaultyStore(LocalStore())
    losses: dict[int, str] = {}
    manager = penstock.CheckpointManager(
        root, save_when=EverySteps(EVERY), config=penstock.Config(processes=LIMITS), store=store
    )
    try:
        async with manager:
            begin = manager.latest_step()
            if begin is not None:
                state = await manager.restore(like=state)
            for step in range(0 if begin is None else begin + 1, STEPS + 1):
                state, loss = step_once(state, step)
                losses[step] = float(loss).hex()
                if is_killed and step == KILLED_AT:
                    await _save_and_die(manager, step, state, store)

                save = await manager.save(step, state)
                if save is not None:
                    await save
    except penstock.errors.PeerError as error:
        return {"error": type(error).__name__, "says": str(error), "losses": losses}

    return {"from": begin, "losses": losses, "digest": digest(state)}


async def _save_and_die(
    manager: penstock.CheckpointManager, step: int, state: Any, store: FaultyStore
) -> None:
    hang = store.hang_on("data.write_at", 1 + sum(one.name == "data.write_at" for one in store.operations))
    await manager.save(step, state)
    await hang.wait_reached()
    await anyio.sleep(3 * LIMITS.beat_s)  # the others hear where it is
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
