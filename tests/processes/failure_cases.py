"""Saves that one process ends for all."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
from tests.processes.job_case import HASTY, Here, checkpointer, reached_and_heard, told_by
from tests.processes.trees import P, differences, mesh_of, spread, whole

import penstock
from penstock import SaveFormat
from penstock.errors import PeerError, PlansDifferError, StorageError
from penstock.handlers import LocalStore
from penstock.handlers.formats.integrity import decode
from penstock.handlers.formats.orbax.file_names import INTEGRITY
from penstock.testing import FaultyStore


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
    for name in (*changed, "format", "metadata"):
        tree, is_odd = whole(mesh), here.rank == here.last
        change = changed.get(name)
        form = SaveFormat(ocdbt=not (is_odd and name == "format"))
        metadata = {"a": 1} if is_odd and name == "metadata" else None
        async with checkpointer(save_format=form) as opened:
            try:
                asked = change(tree) if is_odd and change is not None else tree
                await (await opened.save(path, asked, custom_metadata=metadata))
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
                await reached_and_heard(hang)
                note.write_text(str(os.getpid()))
                # To this thread: another may take one for the process, and this one goes on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                hang.release()
            told = await told_by(save)

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
            await reached_and_heard(hang)
            os.kill(os.getpid(), signal.SIGKILL)

        told = await told_by(save)

        restored = await opened.restore(here.folder / "step_1", like=tree)
        return {"told": told, "differs": differences(restored, tree)}
