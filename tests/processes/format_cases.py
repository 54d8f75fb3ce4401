"""What can be saved together: formats, items, steps."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from tests.own_files import listed
from tests.processes.job_case import LIMITS, Here, checkpointer
from tests.processes.trees import P, differences, mesh_of, spread

import penstock
from penstock import PerProcess, SaveFormat
from penstock.config import Config
from penstock.errors import PeerError, SpecError, StorageError
from penstock.handlers import LocalStore, SafetensorsLayout
from penstock.items import Composite, Json
from penstock.steps import KeepLast
from penstock.testing import FaultyStore


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


async def one_codec_is_chosen_for_all_parts_of_a_leaf(here: Here) -> Any:
    """Save leaves whose parts compress well, or not, or in one process alone."""
    mesh, rng = mesh_of(here.count), np.random.default_rng(0)
    noise = rng.integers(0, 2**32, (64, 2048), np.uint32)
    last = (64 // here.count) * here.last
    mixed, half = noise.copy(), noise.copy()
    mixed[last:], half[32:] = 0, 0
    specs = {"noise": P("host"), "zeros": P("host"), "half": P("host"), "all": P(), "large": P()}
    held = {
        "noise": noise,
        "zeros": noise * 0,
        "half": half,
        "all": noise[:4] * 0,
        "large": np.tile(noise, (4, 1)),
    }
    tree = {**spread(held, specs, mesh), "host": np.zeros(10_000), "own": PerProcess(np.zeros(10_000))}
    changed = {**tree, **spread({"noise": mixed}, {"noise": P("host")}, mesh)}
    found: dict[str, Any] = {}
    for name, form in {
        "auto": SaveFormat(codec="auto"),
        "auto in directories": SaveFormat(codec="auto", ocdbt=False),
    }.items():
        async with checkpointer(save_format=form) as opened:
            for step, values in (
                ("1", tree),
                ("2", tree),
                ("3", changed),
            ):  # the plan is known from the second on
                path, base = here.folder / name / step, here.folder / name / "1"
                save = await opened.save(path, values, base=None if step == "1" else base, compare="digest")
                report = await save
                found[f"{name} {step}"] = {
                    "differs": differences(await opened.restore(path, like=values), values),
                    "intact": (await opened.verify(path)).intact,
                    "kept": report.nbytes_kept,
                }
    folder = here.folder / "auto in directories"
    await here.meet("saved")
    for step in "13":
        names = [*held, "host", "own.process_1-of-" + str(here.count)]
        said = {x: json.loads((folder / step / x / ".zarray").read_text())["compressor"] for x in names}
        found[f"encoded {step}"] = sorted(name.split(".")[0] for name, codec in said.items() if codec)

    return found


async def safetensors_are_written_together(here: Here) -> Any:
    """One file, a folder with one, and a folder with several; all processes write into each."""
    mesh, told = mesh_of(here.count), dict[str, Any]()
    x = np.arange(64 * 2048, dtype=np.float32).reshape(64, 2048)
    specs = {
        "rows": P("host"),
        "columns": P(None, ("host", "device")),
        "all": P(),
        "both": P("device", "host"),
    }
    arrays = spread({name: x + at for at, name in enumerate(specs)}, specs, mesh)
    tree = {**arrays, "host": np.arange(5000), "text": "hello", "nothing": None, "key": jax.random.key(1)}
    store = FaultyStore(LocalStore())
    for name, layout in {
        "one.safetensors": SafetensorsLayout(),
        "folder": SafetensorsLayout(),
        "several": SafetensorsLayout(max_shard_bytes=x.nbytes),
    }.items():
        path = here.folder / name
        async with checkpointer(layout=layout) as opened:
            await (await opened.save(path, {**tree, "text": "before"}))
            report = await (await opened.save(path, tree, overwrite=True))
            back = await opened.restore(path, like=tree)
            intact = (await opened.verify(path)).intact
            told[name] = {"differs": differences(back, tree), "intact": intact, "nbytes": report.nbytes}

    await here.meet("saved")
    async with checkpointer(store, layout=SafetensorsLayout()) as opened:
        if here.rank == here.last:
            store.fail_on("data.write_at")
        try:
            await (await opened.save(here.folder / "failed", tree))
        except (StorageError, PeerError) as error:
            told["failed"] = type(error).__name__
        try:
            await (await opened.save(here.folder / "own", {**tree, "own": PerProcess(np.arange(3))}))
        except SpecError as error:
            told["own"] = str(error)

    await here.meet("failed")
    return {
        **told,
        "there": here.names(),
        "wanted": sum(leaf.nbytes for leaf in arrays.values()) + 40_000 + 8,
    }


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
        "steps": listed(root),
        "latest": latest,
        "differs": differences(found, state(4)),
        "items": differences({name: back[name] for name in like}, like),
        "notes": back.get("notes"),
    }
