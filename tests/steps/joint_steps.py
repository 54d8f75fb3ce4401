"""What the processes of a job save in tests of tiers: something that all hold, and something of their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.steps.job_of_managers import COUNT, Managers, each, opened

import penstock
from penstock import Checkpointer, CheckpointManager, PerProcess, SaveFuture
from penstock.kernel.protocols import DISK_MARK

Options = Callable[[int], dict[str, Any]]


def state(step: int, index: int) -> dict[str, Any]:
    """What all hold, and what one process has for itself."""
    own = {"p": np.full(300 * (index + 1), step), "host": f"h{index}"}
    return {"w": np.full(1 << 16, step, np.float32), "n": step, "own": PerProcess(own)}


async def save(managers: Managers, step: int) -> list[SaveFuture]:
    """Begin to save a step in all."""

    async def begin(manager: CheckpointManager) -> SaveFuture:
        found = await manager.save(step, state(step, managers.index(manager)))
        assert found is not None
        return found

    return await each(managers, begin)


async def finished(managers: Managers, *steps: int) -> None:
    for step in steps:
        for future in await save(managers, step):
            await future


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def known(managers: Managers) -> list[list[int]]:
    return [list(manager.all_steps()) for manager in managers]


async def check(managers: Managers, step: int) -> None:
    """Check that each process restores what it saved."""

    async def restore(manager: CheckpointManager) -> None:
        index = managers.index(manager)
        found, expected = await manager.restore(step, like=state(0, index)), state(step, index)
        np.testing.assert_array_equal(found["w"], expected["w"])
        assert found["n"] == step
        np.testing.assert_array_equal(found["own"].value["p"], expected["own"].value["p"])
        assert found["own"].value["host"] == f"h{index}"

    await each(managers, restore)


class KilledError(Exception):
    """The end of all processes of a job."""


@asynccontextmanager
async def killed(root: Path, options: Options) -> AsyncGenerator[Managers]:
    """Open managers that all end with the block, in the middle of what they do."""
    try:
        async with opened(root, options) as managers:
            yield managers
            raise KilledError
    except BaseExceptionGroup as group:
        _, others = group.split(KilledError)
        if others is not None:
            raise others from None


async def check_whole(path: Path, step: int) -> None:
    """Check that one process alone finds there what all have saved, and nothing that says a part."""
    assert (await penstock.verify(path)).intact
    assert not (path / DISK_MARK).exists()
    async with Checkpointer() as checkpointer:
        found = await checkpointer.restore(path)

    np.testing.assert_array_equal(found["w"], state(step, 0)["w"])
    for index in range(COUNT):
        own = found["own"][f"process_{index}-of-{COUNT}"]
        np.testing.assert_array_equal(own["p"], state(step, index)["own"].value["p"])
        assert own["host"] == f"h{index}"
