"""What the processes of a job do together in tests. Each returns JSON values, or fails."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from tests.processes.trees import (
    LARGE,
    P,
    differences,
    distinct_bytes,
    large_values,
    mesh_of,
    spread,
    whole,
)

import penstock
from penstock.errors import InvalidLeafError, PeerError, PlansDifferError, StorageError
from penstock.handlers.formats.common.integrity import decode
from penstock.handlers.formats.orbax.documents.file_names import INTEGRITY
from penstock.handlers.stores.local import LocalStore
from penstock.items import Composite, Json
from penstock.kernel.config.config import Config
from penstock.kernel.config.job_limits import JobLimits
from penstock.kernel.config.save_format import SaveFormat
from penstock.steps import KeepLast
from penstock.testing import FaultyStore

LIMITS = JobLimits(join_s=40.0, write_s=40.0, silence_s=20.0, beat_s=0.5, call_s=10.0)
HASTY = JobLimits(join_s=40.0, write_s=40.0, silence_s=5.0, beat_s=0.5, call_s=5.0)


@dataclass
class Here:
    """What a case knows of the job."""

    folder: Path  #: the same for all processes
    rank: int
    count: int
    client: Any  #: of jax's coordination service
    leaves_at_once: bool = False

    @property
    def last(self) -> int:
        return self.count - 1

    async def meet(self, name: str) -> None:
        """Wait until all processes are here."""
        await anyio.to_thread.run_sync(
            self.client.wait_at_barrier, f"{self.folder.name} {name}", 30_000, abandon_on_cancel=True
        )

    def names(self) -> list[str]:
        """Return what lies in the case's folder."""
        return sorted(os.listdir(self.folder)) if self.folder.exists() else []


@asynccontextmanager
async def checkpointer(
    store: Any = None, limits: JobLimits = LIMITS, **options: Any
) -> AsyncGenerator[penstock.Checkpointer]:
    """Open a Checkpointer, and see that nothing is left of its budget at the end."""
    async with penstock.Checkpointer(store=store, config=Config(processes=limits), **options) as opened:
        yield opened

    assert opened.statistics().leased == 0, opened.statistics()


async def saves_and_restores(here: Here) -> Any:
    tree = whole(mesh_of(here.count))
    async with checkpointer() as opened:
        report = await (await opened.save(here.folder / "step_1", tree))
        restored = await opened.restore(here.folder / "step_1", like=tree)
        bare = await opened.restore(here.folder / "step_1")
        verified = await opened.verify(here.folder / "step_1")

    assert here.names() == ["step_1"], here.names()
    assert verified.intact, verified.findings
    return {
        "nbytes": report.nbytes,
        "n_leaves": report.n_leaves,
        "differs": differences(restored, tree),
        "bare": sorted(bare),
        "text": bare["text"],
    }


async def orbax_reads(here: Here) -> Any:
    """Restore by Orbax, in all processes together, what the case above wrote."""
    import orbax.checkpoint as ocp

    tree = whole(mesh_of(here.count))
    tree = {key: value for key, value in tree.items() if key not in ("key", "local")}  # not global
    found = ocp.PyTreeCheckpointer().restore(
        here.folder.parent / "saves_and_restores" / "step_1",
        args=ocp.args.PyTreeRestore(
            tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
        ),
    )
    return {"differs": differences(found, tree)}


async def orbaxs_names_refuse_what_is_spread(here: Here) -> Any:
    """They have no way yet to save it together, so no process may wait for another."""

    def save() -> str:
        import penstock.orbax as ocp

        try:
            # Each at a path of its own: of two that build in one place, the second is refused for that.
            ocp.PyTreeCheckpointer().save(here.folder / f"step_{here.rank}", whole(mesh_of(here.count)))
        except InvalidLeafError as error:
            return str(error.key_path)

        return "saved"

    return await anyio.to_thread.run_sync(save)


async def trees_that_differ_are_refused(here: Here) -> Any:
    path, mesh, told = here.folder / "step_1", mesh_of(here.count), {}
    changed: dict[str, Callable[[Any], Any]] = {
        "bytes": lambda tree: {**tree, "numpy": tree["numpy"] + 1},
        "leaf": lambda tree: {**tree, "extra": 1},
        "type": lambda tree: {**tree, "number": 7.0},
        "spec": lambda tree: {
            **tree,
            "rows": spread(np.zeros((8, 8), np.float32), P("host"), mesh),
        },
    }
    for name, change in changed.items():
        tree = whole(mesh)
        async with checkpointer() as opened:
            try:
                await (await opened.save(path, change(tree) if here.rank == here.last else tree))
            except PlansDifferError as error:
                told[name] = {"who": list(error.processes), "what": list(error.differences)}
        await here.meet(name)
        assert here.names() == [], here.names()

    async with checkpointer() as opened:
        await (await opened.save(path, whole(mesh)))

    return told


async def a_failure_ends_it_for_all(here: Here) -> Any:
    path, tree, told = here.folder / "step_1", whole(mesh_of(here.count)), {}
    async with checkpointer() as opened:
        await (await opened.save(here.folder / "step_0", tree))

    for operation in ("create_data_file", "data.write_at", "data.sync", "make_directory", "sync_directory"):
        for who in sorted({0, here.last}):
            store = FaultyStore(LocalStore())
            async with checkpointer(store) as opened:
                if here.rank == who:
                    store.fail_on(operation)
                try:
                    await (await opened.save(path, tree))
                except (StorageError, PeerError) as error:
                    found = [type(error).__name__, list(getattr(error, "processes", ()))]
                    told[f"{operation} {who}"] = [*found, getattr(error, "peer_stage", None) or error.stage]
            await here.meet(f"{operation} {who}")
            assert here.names() == ["step_0"], here.names()
            assert store.open_files == 0

    async with checkpointer() as opened:
        await (await opened.save(path, tree))
        assert differences(await opened.restore(here.folder / "step_0", like=tree), tree) == []

    return told


async def a_cancellation_ends_it_for_all(here: Here) -> Any:
    path, tree = here.folder / "step_1", whole(mesh_of(here.count))
    store = FaultyStore(LocalStore())
    told = ""
    async with checkpointer(store) as opened:
        hang = store.hang_on("data.write_at") if here.rank == here.last else None
        save = await opened.save(path, tree)
        if hang is not None:
            await hang.wait_reached()
            save.cancel()
            hang.release()
        try:
            await save
        except penstock.errors.PenstockError as error:
            told = f"{type(error).__name__} {list(getattr(error, 'processes', ()))}"

        await here.meet("cancelled")
        assert here.names() == [], here.names()
        await (await opened.save(path, tree))

    return told


async def saves_in_opposite_order_do_not_cross(here: Here) -> Any:
    mesh = mesh_of(here.count)
    trees = {
        name: spread({"x": np.full((8, 8), at, np.float32)}, {"x": P("host")}, mesh)
        for at, name in enumerate("abcd")
    }
    async with checkpointer() as opened:
        saves = [
            await opened.save(here.folder / name, trees[name])
            for name in (sorted(trees) if here.rank % 2 else sorted(trees, reverse=True))
        ]
        for save in saves:
            await save
        return [
            differences(await opened.restore(here.folder / name, like=trees[name]), trees[name])
            for name in trees
        ]


async def calls_and_keys_stay_few(here: Here) -> Any:
    mesh = mesh_of(here.count)
    few = spread({"x": np.ones((8, 8), np.float32)}, {"x": P("host")}, mesh)
    many = spread(
        {str(at): np.ones((8, 8), np.float32) for at in range(200)},
        {str(at): P("host") for at in range(200)},
        mesh,
    )
    calls: list[int] = []
    rarely = JobLimits(
        join_s=40.0, write_s=40.0, silence_s=50.0, beat_s=20.0
    )  # else slow saves have more beats
    async with checkpointer(limits=rarely) as opened:
        coordinator: Any = opened.engine.coordinator
        for step, tree in enumerate([few, many, few, few, few, few]):
            before = sum(coordinator.calls.values())
            await (await opened.save(here.folder / f"step_{step}", tree))
            calls.append(sum(coordinator.calls.values()) - before)

    await here.meet("all saved")
    left = len(here.client.key_value_dir_get("penstock/"))
    await here.meet("looked")
    return {"calls": calls, "left": left}


async def the_budget_is_kept(here: Here) -> Any:
    mesh = mesh_of(here.count)
    tree = spread(
        {str(at): np.full((1024, 512), at, np.float32) for at in range(6)},
        {str(at): P("host") if at % 2 else P() for at in range(6)},
        mesh,
    )
    held = {"a host leaf": np.arange(2**18, dtype=np.float64), **tree}
    async with checkpointer(memory_limit=2**20) as opened:
        await (await opened.save(here.folder / "step_1", held))
        peak = opened.statistics().peak
        found = await opened.restore(here.folder / "step_1", like=held)

    return {"peak": peak, "differs": differences(found, held)}


async def saves_large_arrays(here: Here) -> Any:
    """Save what other jobs restore."""
    tree = spread(large_values(), LARGE, mesh_of(here.count))
    async with checkpointer() as opened:
        await (await opened.save(here.folder / "step_1", tree))


async def reads_what_its_devices_hold(here: Here) -> Any:
    """Restore what a job of any size saved as `saved`, and count the bytes."""
    tree = spread(large_values(), LARGE, mesh_of(here.count))
    read: dict[str, int] = {}
    async with checkpointer() as opened:
        for name in tree:
            before = _bytes_read()
            found = await opened.restore(_saved(here), like={name: tree[name]}, only=[name])
            read[name] = _bytes_read() - before
            assert differences(found[name], tree[name]) == []

        document_bytes = _bytes_read()
        await opened.metadata(_saved(here))
        document_bytes = _bytes_read() - document_bytes

    need = {name: distinct_bytes(tree[name]) for name in tree}
    return {"read": read, "need": need, "documents": document_bytes}


def _saved(here: Here) -> Path:
    """Return what another job left for this one, or an earlier case of this one."""
    given = here.folder.parent / "saved"
    return given if given.exists() else here.folder.parent / "saves_large_arrays" / "step_1"


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


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


async def what_is_replicated_is_divided(here: Here) -> Any:
    """Large and small arrays, all of them on every device."""
    mesh, rng = mesh_of(here.count), np.random.default_rng(0)
    held = {f"layer {at}": rng.normal(size=(16, 8 * (1 + at % 7))).astype(np.float32) for at in range(60)}
    held["large"] = rng.normal(size=(64, 1024)).astype(np.float32)
    tree = spread(held, {name: P() for name in held}, mesh)
    found: dict[str, Any] = {}
    for name, form in {
        "cut": SaveFormat(replica_parallel_min_bytes=4096),
        "two": SaveFormat(replica_parallel_min_bytes=4096, replica_parallel_max_replicas=2),
        "whole": SaveFormat(replica_parallel=False),
    }.items():
        async with checkpointer(save_format=form) as opened:
            await (await opened.save(here.folder / f"{name} 0", tree))
            report = await (await opened.save(here.folder / f"{name} 1", tree))  # the plan is known by now
            found[name] = report.nbytes
            assert differences(await opened.restore(here.folder / f"{name} 1", like=tree), tree) == []

    return {"wrote": found, "all": sum(value.nbytes for value in held.values())}


async def one_is_stopped_and_wakes(here: Here) -> Any:
    """The last process is stopped while it writes, and wakes when the others save that path again."""
    tree, path = whole(mesh_of(here.count)), here.folder / "step_1"
    note = here.folder.parent / "who is to be stopped"
    store = FaultyStore(LocalStore())
    told: list[Any] = []
    async with checkpointer(store, limits=HASTY) as opened:
        hang = store.hang_on("data.write_at") if here.rank == here.last else None
        save = await opened.save(path, tree)
        async with anyio.create_task_group() as tasks:
            if hang is not None:
                await hang.wait_reached()
                await anyio.sleep(2 * HASTY.beat_s)  # so that all heard where it is
                note.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
                hang.release()
            try:
                await save
            except PeerError as error:
                told = [type(error).__name__, list(error.processes), error.peer_stage]
            else:
                told = ["saved"]

            if here.rank == 0:
                tasks.start_soon(_wake_soon, int(note.read_text()))
            await (await opened.save(path, tree))

        found = await opened.restore(path, like=tree)
        known = set(decode("", (path / INTEGRITY).read_bytes()).files)

    there = {str(one.relative_to(path)) for one in path.glob("ocdbt.process_*/d/*")}
    return {
        "told": told,
        "there": here.names(),
        "differs": differences(found, tree),
        "unknown": sorted(there - known),
    }


async def _wake_soon(process: int) -> None:
    """Let a process go on, once this one waits for it in the next save."""
    await anyio.sleep(HASTY.beat_s)
    os.kill(process, signal.SIGCONT)


async def one_dies_in_the_middle(here: Here) -> Any:
    """The last process is killed while it writes. The last case of a job."""
    tree = whole(mesh_of(here.count))
    here.leaves_at_once = True
    store = FaultyStore(LocalStore())
    async with checkpointer(limits=HASTY) as opened:
        await (await opened.save(here.folder / "step_1", tree))

    async with checkpointer(store, limits=HASTY) as opened:
        hang = store.hang_on("data.write_at") if here.rank == here.last else None
        save = await opened.save(here.folder / "step_2", tree)
        if hang is not None:
            await hang.wait_reached()
            await anyio.sleep(2 * HASTY.beat_s)  # so that all heard where it is
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            await save
        except PeerError as error:
            told = [type(error).__name__, list(error.processes), error.peer_stage]
        else:
            told = ["saved"]

        restored = await opened.restore(here.folder / "step_1", like=tree)
        return {"told": told, "differs": differences(restored, tree)}
