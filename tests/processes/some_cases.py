"""Saving from some processes of a job, while the others take no part. For three processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import jax
import numpy as np
from jax.sharding import Mesh
from tests.processes.job_case import LIMITS, Here, checkpointer
from tests.processes.trees import P, differences, mesh_of, spread

from penstock import CheckpointManager, JobOptions, PerProcess
from penstock.config import Config
from penstock.errors import InactiveProcessError, InvalidLeafError, SpecError
from penstock.kernel import MemoryRegulator

GROUPS = ((0, 2), (1,))


def mesh_over(processes: tuple[int, ...]) -> Mesh:
    """Return a mesh with a row for each of these processes."""
    devices: list[Any] = [device for device in jax.devices() if device.process_index in processes]
    return Mesh(np.array(devices).reshape(len(processes), -1), ("host", "device"))


def state(processes: tuple[int, ...], rank: int) -> dict[str, Any]:
    """Return a tree on the devices of these processes."""
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    arrays = spread({"x": x, "w": x + 1}, {"x": P("host"), "w": P()}, mesh_over(processes))
    return {**arrays, "group": np.array(processes), "own": PerProcess({"rank": rank})}


async def two_groups_save_at_the_same_time(here: Here) -> Any:
    """Each group saves its own tree, and steps by a manager; the last group is one process alone."""
    group = next(group for group in GROUPS if here.rank in group)
    folder, job = here.folder / f"group {group[0]}", JobOptions(active_processes=group)
    tree = state(group, here.rank)
    await here.meet("ready")
    async with checkpointer(job=job) as opened:
        for step in range(3):
            await (await opened.save(folder / f"step_{step}", tree))

        found = await opened.restore(folder / "step_2", like=tree)

    config = Config(processes=LIMITS, job=job)
    async with CheckpointManager(folder / "run", config=config) as manager:
        for step in range(2):
            save = await manager.save(step, tree)
            assert save is not None
            await save

        latest = manager.latest_step()
        again = await manager.restore(like=tree)

    return {"differs": [differences(found, tree), differences(again, tree)], "latest": latest}


async def who_takes_no_part_is_refused(here: Here) -> Any:
    """Processes 1 and 2 save; process 0 is told that it cannot, and reads what they saved."""
    job, told = JobOptions(active_processes=(1, 2)), dict[str, str]()
    everywhere = spread({"x": np.ones((6, 4), np.float32)}, {"x": P("host")}, mesh_of(here.count))
    path, x = here.folder / "step_1", np.arange(64, dtype=np.float32).reshape(8, 8)
    async with checkpointer(job=job) as opened:
        try:
            await opened.save(here.folder / "everywhere", {"a": {"b": everywhere["x"]}})
        except SpecError as error:
            told["everywhere"] = f"{type(error).__name__} {error}"

        if here.rank:
            tree = spread({"x": x}, {"x": P("host")}, mesh_over((1, 2)))
            await (await opened.save(path, tree))

        await here.meet("saved")
        read = await opened.restore(path, like={"x": np.zeros((8, 8), np.float32)})
        if not here.rank:
            try:
                await opened.save(path, {"x": 1}, overwrite=True)
            except InactiveProcessError as error:
                told["save"] = str(error)

    await here.meet("read")
    return {"told": told, "there": here.names(), "read": bool((read["x"] == x).all())}


async def one_process_takes_no_arrays_of_others(here: Here) -> Any:
    """Process 2 saves alone."""
    everywhere = spread({"x": np.ones((6, 4), np.float32)}, {"x": P("host")}, mesh_of(here.count))
    if here.rank != 2:
        return None

    async with checkpointer(job=JobOptions(active_processes=(2,))) as opened:
        try:
            await opened.save(here.folder / "step_1", {"a": everywhere["x"]})
        except InvalidLeafError as error:
            return str(error)

    return None


async def an_automatic_limit_is_shared(here: Here) -> Any:
    """All processes are on one host."""
    async with checkpointer():
        await here.meet("all are here")
        async with checkpointer() as opened:
            memory = opened.engine.memory
            return {"sharers": memory.sharers, "whole": memory.whole, "alone": MemoryRegulator().whole}


async def a_preemption_is_reached_by_all_at_the_same_step(here: Here) -> Any:
    """Process 1 gets a SIGTERM; all learn of it under Orbax's name. The last case: jax remembers it."""
    from penstock.orbax.utils import reached_preemption

    for step in range(5000):
        if here.rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

        await here.meet(f"step {step}")  # as by the collectives of a training step
        if await anyio.to_thread.run_sync(reached_preemption, step):
            return step

    return None
