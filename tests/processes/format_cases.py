"""What can be saved together: formats, items, steps."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from tests.processes.job_case import LIMITS, Here, checkpointer
from tests.processes.trees import P, differences, mesh_of, spread

import penstock
from penstock.items import Composite, Json
from penstock.kernel.config.config import Config
from penstock.kernel.config.save_format import SaveFormat
from penstock.steps import KeepLast


async def every_format_can_be_written(here: Here) -> Any:
    """Save in each way that arrays can be stored, and overwrite it."""
    mesh = mesh_of(here.count)
    x = np.arange(64 * 256, dtype=np.float32).reshape(64, 256)
    specs = {"rows": P("host"), "columns": P(None, ("host", "device")), "all": P(), "keys": P("device")}
    tree = {
        **spread({name: x + at for at, name in enumerate(specs)}, specs, mesh),
        "host": np.arange(5000, dtype=np.int64),
        "text": "hello",
    }
    found: dict[str, Any] = {}
    for name, form in {
        "zarr3": SaveFormat(zarr=3),
        "directories": SaveFormat(ocdbt=False),
        "directories zarr3": SaveFormat(ocdbt=False, zarr=3),
        "zstd": SaveFormat(codec="zstd"),
        "zstd in directories": SaveFormat(codec="zstd:3", ocdbt=False, zarr=3),
        "small chunks": SaveFormat(chunk_byte_size=4096),
        "small files": SaveFormat(ocdbt_target_data_file_size=8192),
    }.items():
        path = here.folder / name
        async with checkpointer(save_format=form) as opened:
            await (await opened.save(path, {**tree, "text": "before"}))
            await (await opened.save(path, tree, overwrite=True))
            found[name] = differences(await opened.restore(path, like=tree), tree)
            assert (await opened.verify(path)).intact

    return {"differs": found, "there": here.names()}


async def steps_and_items(here: Here) -> Any:
    """Save steps by a manager, with metrics and several items; one process deletes what is not kept."""
    mesh, root = mesh_of(here.count), here.folder / "run"

    def state(step: int) -> dict[str, Any]:
        held = spread({"x": np.full((8, 8), step, np.float32)}, {"x": P("host")}, mesh)
        return {**held, "same": np.arange(3)}

    config = Config(processes=LIMITS)
    async with penstock.CheckpointManager(root, keep=KeepLast(2), config=config) as manager:
        for step in range(5):
            save = await manager.save(step, state(step), metrics={"loss": 1.0 / (step + 1)})
            assert save is not None
            await save

        latest = manager.latest_step()
        found = await manager.restore(like=state(4))
        await manager.wait()

    await here.meet("left")
    like = {"state": state(5), "more": {"y": state(6)["x"]}}
    async with checkpointer() as opened:
        items = Composite(**like, notes=Json({"a": 1}))
        await (await opened.save(here.folder / "items", items))
        back = await opened.restore_items(here.folder / "items", like=like)

    return {
        "steps": sorted(os.listdir(root)),
        "latest": latest,
        "differs": differences(found, state(4)),
        "items": differences({name: back[name] for name in like}, like),
        "notes": back.get("notes"),
    }
