"""Saving to disks of which each process has its own: a folder here. For three processes."""

from __future__ import annotations

import os
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tests.own_files import listed
from tests.processes.bucket_cases import bucket
from tests.processes.job_case import LIMITS, Here, checkpointer
from tests.processes.trees import P, differences, distinct_bytes, host_leaves, mesh_of, spread

from penstock import CheckpointManager, JobOptions, PerProcess, SaveFormat
from penstock.config import Config
from penstock.errors import NotOnThisDiskError, PathError, PeerError, StorageError
from penstock.handlers import LocalStore, SafetensorsLayout
from penstock.items import Composite
from penstock.steps import Disk, KeepLast
from penstock.testing import FaultyStore

FORMATS = {
    "plain": SaveFormat(),
    "parts": SaveFormat(replica_parallel=True, replica_parallel_min_bytes=256),
    "small chunks": SaveFormat(chunk_byte_size=1024),
    "directories": SaveFormat(ocdbt=False, zarr=3),
    "zstd": SaveFormat(codec="zstd"),
}


def disk_of(here: Here) -> Any:
    """Return the disk of this process; no two are called alike."""
    disk = here.folder / f"disk {here.rank}"
    disk.mkdir(parents=True, exist_ok=True)
    return disk


def options(here: Here) -> JobOptions:
    return JobOptions(local_root=os.fspath(disk_of(here)))


def arrays(mesh: Mesh) -> dict[str, Any]:
    """Return arrays that are spread over all of three processes, each in another way."""
    x = np.arange(24 * 48, dtype=np.float32).reshape(24, 48)
    held = {
        "rows": (x, P(("host", "device"))),
        "by_host": (x + 1, P("host")),
        "by_device": (x + 2, P(None, "device")),
        "both": (x * 2, P("device", "host")),
        "replicated": (x[:16] - 3, P()),
        "odd": (np.arange(15, dtype=np.int32).reshape(3, 5), P("host")),
        "zero_d": (np.float32(3.5), P()),
        "half": (x.astype(jnp.bfloat16), P(None, ("host", "device"))),
        "empty": (np.zeros((0, 4), np.float32), P()),
    }
    return {name: spread(value, spec, mesh) for name, (value, spec) in held.items()}


async def safetensors_have_no_parts(here: Here) -> Any:
    """A tensor lies in one file whole, so it cannot be saved to several disks."""
    told: list[str] = []
    async with checkpointer(job=options(here), layout=SafetensorsLayout()) as opened:
        try:
            await (await opened.save(disk_of(here) / "x.safetensors", arrays(mesh_of(here.count))))
        except PathError as error:
            told.append(str(error))

    return {"told": told, "there": sorted(os.listdir(disk_of(here)))}


async def each_saves_to_its_own_disk(here: Here) -> Any:
    mesh, disk, found, wrote = mesh_of(here.count), disk_of(here), dict[str, Any](), dict[str, int]()
    tree = {**arrays(mesh), **host_leaves(), "own": PerProcess({f"only in {here.rank}": here.rank})}
    for name, form in FORMATS.items():
        path = disk / name
        async with checkpointer(save_format=form, job=options(here)) as opened:
            await (await opened.save(path, {**tree, "number": 6}))
            wrote[name] = (await (await opened.save(path, tree, overwrite=True))).nbytes
            found[name] = differences(await opened.restore(path, like=tree), tree)
            verified = await opened.verify(path)
            assert verified.intact, verified.findings

    async with checkpointer(job=options(here)) as opened:
        await (await opened.save(disk / "base", tree, compare="digest"))
        linked = await (await opened.save(disk / "linked", tree, base=disk / "base", compare="digest"))
        items = Composite(state={"x": tree["rows"]}, more={"y": tree["both"]})
        await (await opened.save(disk / "items", items))
        back = await opened.restore_items(
            disk / "items", like={"state": {"x": tree["rows"]}, "more": {"y": tree["both"]}}
        )
        # The same tree to a disk that all see, and back to those of each.
        shared = await (await opened.save(here.folder / "shared", tree))
        found["shared"] = differences(await opened.restore(here.folder / "shared", like=tree), tree)
        again = await (await opened.save(disk / "again", tree))
        assert again.nbytes == wrote["plain"]
        found["again"] = differences(await opened.restore(disk / "again", like=tree), tree)
        found["items"] = differences(back, {"state": {"x": tree["rows"]}, "more": {"y": tree["both"]}})
        found["linked"] = differences(await opened.restore(disk / "linked", like=tree), tree)
        assert (await opened.verify(disk / "items")).intact

    return {
        "differs": found,
        "wrote": wrote["plain"],
        "linked": linked.nbytes,
        "shared": shared.nbytes,
        "distinct": distinct_bytes(arrays(mesh)),
        "there": sorted(os.listdir(disk)),
    }


async def tiers_on_own_disks_come_to_one_root(here: Here) -> Any:
    """Save steps of every format to disks of their own, from where they come to a folder and to a bucket."""
    mesh, disk, found = mesh_of(here.count), disk_of(here), dict[str, Any]()
    large = np.arange(384 * 128, dtype=np.float32).reshape(384, 128)  # shards of it are worth a codec
    tree = {
        **arrays(mesh),
        **host_leaves(),
        "large": spread(large, P(("host", "device")), mesh),
        "large everywhere": spread(large + 1, P(None, "device"), mesh),
        "own": PerProcess({f"only in {here.rank}": here.rank}),
    }
    turned = Mesh(np.asarray(mesh.devices)[::-1], mesh.axis_names)
    config = Config(processes=LIMITS, job=options(here))
    async with bucket(here) as url:
        roots = {**{name: os.fspath(here.folder / name) for name in FORMATS}, "bucket": f"{url}/run"}
        for name, root in roots.items():
            tier, form = Disk(disk / name), FORMATS.get(name)
            async with CheckpointManager(root, tiers=tier, config=config, save_format=form) as manager:
                save = await manager.save(1, tree)
                assert save is not None
                await save.kept()
                found[f"{name}, kept"] = differences(
                    await manager.restore(like=tree, on_unexpected="skip"), tree
                )
                # Shards that other processes have, once the step is where all see it.
                other = {"rows": spread(np.zeros((24, 48), np.float32), P("host"), turned)}
                moved = await manager.restore(like=other, on_unexpected="skip")
                held = spread(np.arange(24 * 48, dtype=np.float32).reshape(24, 48), P("host"), turned)
                found[f"{name}, moved"] = differences(moved, {"rows": held})
                await save

            async with checkpointer(limits=LIMITS) as opened:
                found[name] = differences(
                    await opened.restore(f"{root}/1", like=tree, on_unexpected="skip"), tree
                )
                verified = await opened.verify(f"{root}/1")
                assert verified.intact, verified.findings
                for place, codec in ((tier.path, None), (root, "zstd:1" if name == "zstd" else None)):
                    leaves = (await opened.metadata(f"{place}/1")).leaves
                    assert {leaf.codec for leaf in leaves if "large" in leaf.key_path} == {codec}, place

    return {"differs": found}


async def what_is_on_another_disk_is_named(here: Here) -> Any:
    """Restore onto a mesh in which the devices are in another order."""
    mesh, disk = mesh_of(here.count), disk_of(here)
    turned = Mesh(np.asarray(mesh.devices)[::-1], mesh.axis_names)
    x = {"a": {"b": np.arange(48, dtype=np.float32).reshape(12, 4)}, "w": np.ones(3, np.float32)}
    specs = {"a": {"b": P("host")}, "w": P()}
    told: list[Any] = []
    async with checkpointer(job=options(here)) as opened:
        await (await opened.save(disk / "step_1", spread(x, specs, mesh)))
        like = spread(x, specs, turned)
        part = await opened.restore(disk / "step_1", like={"w": like["w"]}, on_unexpected="skip")
        for wanted in (like, x):
            try:
                await opened.restore(disk / "step_1", like=wanted)
                told.append(None)
            except NotOnThisDiskError as error:
                told.append([error.key_path, error.process, list(error.processes)])

    return {"told": told, "differs": differences(part, {"w": like["w"]})}


async def a_failure_on_one_disk_ends_it_for_all(here: Here) -> Any:
    mesh, disk, told = mesh_of(here.count), disk_of(here), dict[str, Any]()
    tree = spread({"x": np.ones((6, 4), np.float32)}, {"x": P("host")}, mesh)
    for who in (0, here.last):
        for operation in ("begin_build", "data.write_at", "write_file", "publish"):
            store = FaultyStore(LocalStore())
            if here.rank == who:
                store.fail_on(operation)

            path, name = disk / f"{who} {operation}", f"{who} {operation}"
            async with checkpointer(store, job=options(here)) as opened:
                try:
                    await (await opened.save(path, tree))
                    told[name] = "saved"
                except StorageError:
                    told[name] = "own"
                except PeerError as error:
                    told[name] = list(error.processes)

                there = sorted(os.listdir(disk))
                await here.meet(f"failed {name}")
                await (await opened.save(path, tree))
                assert there == [], there

            await here.meet(f"saved {name}")
            shutil.rmtree(path)

    return told


async def steps_are_those_that_all_disks_have(here: Here) -> Any:
    mesh, root = mesh_of(here.count), disk_of(here) / "run"
    config = Config(processes=LIMITS, job=options(here))

    def tree(step: int) -> dict[str, Any]:
        return {"x": spread(np.full((6, 4), step, np.float32), P("host"), mesh)}

    async def save(manager: CheckpointManager, step: int) -> None:
        saved = await manager.save(step, tree(step), metrics={"loss": 1.0 / (step + 1)})
        assert saved is not None
        await saved

    async with CheckpointManager(root, keep=KeepLast(3), config=config) as manager:
        for step in range(5):
            await save(manager, step)

    before = listed(root)
    if here.rank == 1:
        shutil.rmtree(root / "4")

    await here.meet("one lost a step")
    async with CheckpointManager(root, keep=KeepLast(3), config=config) as manager:
        latest, there = manager.latest_step(), listed(root)
        found = differences(await manager.restore(like=tree(3)), tree(3))
        await save(manager, 4)
        again = differences(await manager.restore(like=tree(4)), tree(4))
        await manager.wait()

    return {"before": before, "latest": latest, "there": there, "differs": [found, again]}
