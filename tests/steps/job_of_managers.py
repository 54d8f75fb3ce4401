"""The managers of a job, whose processes are tasks here, with one service."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from anyio import Event, create_task_group

from penstock import CheckpointManager
from penstock.config import JobLimits
from penstock.handlers.coordinators import JobCoordinator
from penstock.kernel.protocols import KeyValues
from penstock.testing import MemoryKeyValues

LIMITS = JobLimits(join_s=30.0, write_s=30.0, silence_s=30.0, beat_s=0.2, call_s=5.0)
COUNT = 3
KEPT = ("/join/", "/at/", "/places/", "/ended/")  # keys that may be there at the end

Managers = list[CheckpointManager]


def state(step: int) -> dict[str, Any]:
    return {"x": np.full(5, step)}


@asynccontextmanager
async def opened(
    root: Path,
    options: Callable[[int], dict[str, Any]],
    limits: JobLimits = LIMITS,
    seen: Callable[[int, KeyValues], KeyValues] = lambda _, service: service,
) -> AsyncGenerator[Managers]:
    """Open the manager of each process with options of its own, and perhaps a root of its own.

    Each waits for the others to be opened.

    Args:
        root: Of the steps.
        options: Of a process.
        limits: Of their waits.
        seen: Returns the service as a process sees it.
    """
    service, found, is_open, leave = MemoryKeyValues(), dict[int, CheckpointManager](), Event(), Event()

    async def live(index: int) -> None:
        coordinator = JobCoordinator(seen(index, service), index, COUNT, limits)
        given: dict[str, Any] = {"root": root, **options(index)}
        async with CheckpointManager(coordinator=coordinator, **given) as manager:
            found[index] = manager
            if len(found) == COUNT:
                is_open.set()

            await leave.wait()

    async with create_task_group() as tasks:
        for index in range(COUNT):
            tasks.start_soon(live, index)

        await is_open.wait()
        yield [found[index] for index in range(COUNT)]
        leave.set()

    ended = service.under("penstock/ended/0/").items()
    outcomes = [value.split()[0].decode() for key, value in ended if key != "n"]
    assert [key for key in service.keys if not any(part in key for part in (*KEPT, *outcomes))] == []


async def each(managers: Managers, do: Callable[[CheckpointManager], Awaitable[Any]]) -> list[Any]:
    """Let all of them do something at once; return what each of them got."""
    found: list[Any] = [None] * len(managers)

    async def one(index: int) -> None:
        found[index] = await do(managers[index])

    async with create_task_group() as tasks:
        for index in range(len(managers)):
            tasks.start_soon(one, index)

    return found


async def offer(managers: Managers, *steps: int) -> list[int]:
    """Offer steps to all; return those that were saved, which must be the same for all."""

    async def one(manager: CheckpointManager) -> list[int]:
        saved: list[int] = []
        for step in steps:
            save = await manager.save(step, state(step))
            if save is not None:
                await save
                saved.append(step)

        return saved

    first, *others = await each(managers, one)
    assert all(found == first for found in others)
    return list(first)
