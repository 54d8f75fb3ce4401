"""Restores of which one replica reads, and the others receive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
from tests.processes.job_case import HASTY, Here, checkpointer
from tests.processes.reading_cases import bytes_read
from tests.processes.trees import P, differences, mesh_of, spread
from tests.proofs.killed_member import EndingKeyValues

import penstock
from penstock.config import Config
from penstock.errors import CorruptCheckpointError, PeerError, PlansDifferError
from penstock.handlers.coordinators import JaxKeyValues, JobCoordinator

KIB = 1024
SPECS: Mapping[str, Any] = {
    "on one axis": P("device"),
    "on no axis": P(),
    "half": P(None, "device"),
    "flags": P(),
    "one": P(),
    "empty": P(),
    "apart": P("host"),
}
SHARED = ("on one axis", "on no axis", "half", "flags", "one")


def values() -> dict[str, Any]:
    """Return the values, of all bit patterns that arithmetic would change."""
    bits = np.random.default_rng(0).integers(0, 2**32, (256, KIB), np.uint32)
    return {
        "on one axis": bits.view(np.float32),
        "on no axis": bits[:32].view(np.float32),
        "half": bits[:16].view(np.uint16).view(jnp.bfloat16),
        "flags": bits[0, :64] % 2 == 0,
        "one": np.float32(-0.0),
        "empty": np.zeros((0, 4), np.float32),
        "apart": bits[:8].view(np.int32),
    }


async def one_replica_reads(here: Here) -> Any:
    """Restore along either axis of the mesh: over hosts, and over the devices of each."""
    mesh = mesh_of(here.count)
    tree: dict[str, Any] = {
        **spread(values(), SPECS, mesh),
        "host": np.arange(9),
        "key": jax.random.key(7),
    }
    found: dict[str, Any] = {}
    async with checkpointer(memory_limit=4 * KIB**2) as opened:
        await (await opened.save(here.folder / "step_1", tree))
        await opened.metadata(here.folder / "step_1")
        for axis in ("host", "device", "none"):
            before = bytes_read()
            restored = await opened.restore(here.folder / "step_1", like=tree, replica_axis=axis)
            found[axis] = {"read": bytes_read() - before, "differs": differences(restored, tree)}
            found[axis]["alike"] = [name for name in SPECS if restored[name].sharding != tree[name].sharding]

        before = bytes_read()
        await opened.metadata(here.folder / "step_1")
        found["documents"] = bytes_read() - before
        found["peak"] = opened.statistics().peak

    found["shared"] = sum([tree[name].nbytes for name in SHARED])
    return found


async def two_restores_at_once_take_turns(here: Here) -> Any:
    """Begin two restores in another order in each process; what one sends must not come to the other."""
    mesh, spec = mesh_of(here.count), {"x": P("device")}
    trees = {
        name: spread({"x": np.full((64, 4 * KIB), at, np.float32)}, spec, mesh)
        for at, name in enumerate(("one", "two", "three"), 1)
    }
    found: dict[str, Any] = {}
    async with checkpointer() as opened:
        for name, tree in trees.items():
            await (await opened.save(here.folder / name, tree))

        async def restore(name: str) -> None:
            tree = await opened.restore(here.folder / name, like=trees[name], replica_axis="host")
            found[name] = differences(tree, trees[name])

        async with anyio.create_task_group() as tasks:
            for name in [*trees][:: 1 if here.rank % 2 else -1]:
                tasks.start_soon(restore, name)

    return found


async def orbaxs_handler_reads_one_replica(here: Here) -> Any:
    """Register Orbax's handler, and restore by a checkpointer of one tree."""
    mesh = mesh_of(here.count)
    tree: dict[str, Any] = {**spread(values(), SPECS, mesh), "host": np.arange(9)}
    del tree["empty"]  # which Orbax does not save

    def restore() -> Any:
        import penstock.orbax as ocp

        path, handlers = here.folder / "a", ocp.type_handlers
        with ocp.PyTreeCheckpointer() as opened:
            opened.save(path, tree)

        registry = handlers.create_type_handler_registry(
            (jax.Array, handlers.SingleReplicaArrayHandler(replica_axis_index=0)),
            (np.ndarray, handlers.NumpyHandler()),
        )
        asked = {
            name: handlers.RestoreArgs(restore_type=np.ndarray)
            if name == "host"
            else handlers.SingleReplicaArrayRestoreArgs(
                sharding=value.sharding, global_shape=value.shape, dtype=value.dtype
            )
            for name, value in tree.items()
        }
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        with ocp.Checkpointer(handler) as opened:
            args = ocp.args.PyTreeRestore(item=tree, restore_args=asked)
            opened.restore(path, args=args)  # which imports what it needs
            before = bytes_read()
            found = opened.restore(path, args=args)
            return {"read": bytes_read() - before, "differs": differences(found, tree)}

    found = await anyio.to_thread.run_sync(restore)
    return {**found, "shared": sum([tree[name].nbytes for name in SHARED])}


async def who_cannot_read_tells_all(here: Here) -> Any:
    """Damage what the first replica reads; and ask for different things."""
    mesh = mesh_of(here.count)
    tree = spread(values(), SPECS, mesh)
    path = here.folder / "step_1"
    told: dict[str, Any] = {}
    async with checkpointer() as opened:
        await (await opened.save(path, tree))
        await here.meet("saved")
        try:
            like = {**tree, "half": tree["flags"]} if here.rank == 1 else dict(tree)
            await opened.restore(path, like=like, replica_axis="host")
        except PlansDifferError as error:
            told["differ"] = [list(error.processes), error.differences[0][:8]]
        if here.rank == 0:
            for file in path.glob("ocdbt.process_*/d/*"):
                file.write_bytes(bytes(file.stat().st_size))

        await here.meet("damaged")
        try:
            like = {name: tree[name] for name in SHARED}
            await opened.restore(path, like=like, replica_axis="host", only=[*SHARED])
        except (PeerError, CorruptCheckpointError) as error:
            told["damaged"] = [type(error).__name__, error.key_path is not None]

    return told


async def one_dies_before_the_broadcast(here: Here) -> Any:
    """The last process dies when all others are about to receive."""
    held = {name: values()[name] for name in SHARED}
    tree = spread(held, {name: SPECS[name] for name in SHARED}, mesh_of(here.count))
    service: Any = JaxKeyValues()
    if here.rank == here.last:
        service = EndingKeyValues(service, "wait", "/start_replicas", False, partial(os._exit, 0))

    coordinator = JobCoordinator(service, here.rank, here.count, HASTY)
    here.leaves_at_once = True
    async with penstock.Checkpointer(coordinator=coordinator, config=Config(processes=HASTY)) as opened:
        await (await opened.save(here.folder / "step_1", tree))
        try:
            await opened.restore(here.folder / "step_1", like=tree, replica_axis="host")
        except PeerError as error:
            return [type(error).__name__, list(error.processes), error.peer_stage]

    return ["restored"]
