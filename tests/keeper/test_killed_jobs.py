"""Jobs of which all processes are killed: their keepers bring the newest step to the root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.keeper.conftest import RunningKeeper, Start

import penstock

pytestmark = [pytest.mark.process, pytest.mark.timeout(240), pytest.mark.anyio]

COUNT = 3

TRAINING = """
import anyio, os, sys
import numpy as np
from penstock import PerProcess
from penstock.handlers import LocalStore
from penstock.handlers.coordinators import JobCoordinator
from penstock.handlers.coordinators.store_key_values import StoreKeyValues
from penstock.steps import CheckpointManager, Memory

async def train(service, root, index, count):
    coordinator = JobCoordinator(StoreKeyValues(LocalStore(), service), index, count)
    async with CheckpointManager(root, tiers=Memory(), coordinator=coordinator) as manager:
        for step in (1, 2):
            own = PerProcess(np.full(1000, 10 * step + index))
            save = await manager.save(step, {"w": np.full(300_000, step, np.float32), "own": own})
            await save.kept()
            if step == 1:
                await save
                if index == 0:  # from now on the root takes nothing
                    os.rename(root, root + " aside")
                    open(root, "x").close()
        print("kept", flush=True)
        await anyio.sleep_forever()

anyio.run(train, sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""


def killed_when_kept(folder: Path, root: Path, keepers: Sequence[RunningKeeper]) -> None:
    """Train on a host for each keeper; once a step is kept, and is not in the root, kill all."""
    jobs: list[subprocess.Popen[str]] = []
    for index in range(COUNT):
        socket = keepers[min(index, len(keepers) - 1)].socket
        environ = {**os.environ, "PENSTOCK_STORE__KEEPER__SOCKET": socket}
        command = [sys.executable, "-c", TRAINING, str(folder / "service"), str(root), str(index), str(COUNT)]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ))

    try:
        for job in jobs:
            assert job.stdout is not None
            assert job.stdout.readline() == "kept\n"
    finally:
        for job in jobs:
            job.kill()
        for job in jobs:
            job.communicate()


async def test_the_keepers_of_a_killed_job_bring_its_newest_step_to_the_root(
    start: Start, tmp_path: Path
) -> None:
    root, keepers = tmp_path / "run", [start(), start()]
    killed_when_kept(tmp_path, root, keepers)
    root.unlink()
    (tmp_path / "run aside").rename(root)
    assert not (root / "2").exists()
    async for step in penstock.watch(root, timeout_s=200):
        if step == 2:
            break

    assert (await penstock.verify(root / "2")).intact
    async with penstock.Checkpointer() as checkpointer:
        found = await checkpointer.restore(root / "2")

    np.testing.assert_array_equal(found["w"], np.full(300_000, 2, np.float32))
    for index in range(COUNT):
        np.testing.assert_array_equal(found["own"][f"process_{index}-of-{COUNT}"], np.full(1000, 20 + index))
