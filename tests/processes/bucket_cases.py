"""Saving to a bucket, and restoring from it, together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from tests.object_server import BUCKET, CREDENTIALS, object_server
from tests.processes.job_case import HASTY, Here, checkpointer, reached_and_heard, told_by
from tests.processes.trees import P, differences, mesh_of, spread, whole

import penstock
from penstock.config import Config, StoreOptions
from penstock.errors import PenstockError, UnsupportedByStoreError
from penstock.handlers.stores.buckets import BucketStore, connect
from penstock.orbax.item_files import store_at
from penstock.rules import Cast, Rename, Rules, Split, Stack, Transpose
from penstock.steps import CheckpointManager, KeepLast
from penstock.testing import FaultyStore


@asynccontextmanager
async def bucket(here: Here) -> AsyncGenerator[str]:
    """Yield the URL of a prefix in a bucket: of the server in the environment, or of one in process 0."""
    root = os.environ.get("TESTS_BUCKET", f"s3://{BUCKET}")
    async with AsyncExitStack() as ends:
        if root.startswith("s3:") and "AWS_ENDPOINT_URL" not in os.environ:
            told = here.folder.parent / f"{here.folder.name} endpoint"
            if here.rank == 0:
                told.write_text(ends.enter_context(object_server()).endpoint)
            await here.meet("served")
            os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=told.read_text())
            ends.callback(os.environ.pop, "AWS_ENDPOINT_URL")

        yield f"{root}/{here.folder.name}"
        await here.meet("no longer served")


def opened_bucket() -> BucketStore:
    """Return the bucket as penstock opens it by itself, to be given faults."""
    return BucketStore(f"s3://{BUCKET}", connect(BUCKET, StoreOptions().s3, None, os.environ))


def left_over(url: str) -> list[str]:
    """Return every key below a prefix, and beside it, that no checkpoint has."""
    store = store_at(url)
    assert isinstance(store, BucketStore)
    keys = [str(key) for key in store._client.walk(url.split("/", 3)[3])]
    return [key for key in keys if "penstock-saving" in key or "_PENSTOCK_PARTS" in key]


def many(here: Here, value: float = 1.0) -> Any:
    """Return so many leaves that what each process tells of them goes by an object."""
    values = {f"layer {at}": np.full((4, 8), value + at, np.float32) for at in range(240)}
    return spread(values, {name: P("host") for name in values}, mesh_of(here.count))


async def saves_to_a_bucket(here: Here) -> Any:
    tree, leaves = whole(mesh_of(here.count)), many(here)
    found: dict[str, Any] = {}
    async with bucket(here) as url, checkpointer() as opened:
        found["nbytes"] = (await (await opened.save(f"{url}/1", tree))).nbytes
        await (await opened.save(f"{url}/2", leaves))
        report = await (await opened.save(f"{url}/3", leaves, base=f"{url}/2"))
        found["kept"] = report.nbytes_kept
        found["differs"] = [
            *differences(await opened.restore(f"{url}/1", like=tree), tree),
            *differences(await opened.restore(f"{url}/3", like=leaves), leaves),
        ]
        found["intact"] = [(await opened.verify(f"{url}/{step}")).intact for step in (1, 3)]
        try:
            await (await opened.save(f"{url}/1", tree))
        except PenstockError as error:
            found["again"] = type(error).__name__

        await (await opened.save(f"{url}/2", tree, overwrite="delete-first"))
        found["differs"] += differences(await opened.restore(f"{url}/2", like=tree), tree)
        await here.meet("saved")
        found["left"] = left_over(url)
        return found


async def a_bucket_keeps_steps(here: Here) -> Any:
    tree = whole(mesh_of(here.count))
    async with bucket(here) as url, CheckpointManager(url, keep=KeepLast(2)) as manager:
        for step in (1, 2, 3):
            save = await manager.save(step, tree)
            assert save is not None
            await save

        await manager.wait()
        return {
            "steps": list(manager.all_steps()),
            "differs": differences(await manager.restore(like=tree), tree),
        }


async def one_dies_saving_to_a_bucket(here: Here) -> Any:
    """The last process is killed while it writes. The last case of a job."""
    tree = whole(mesh_of(here.count))
    here.leaves_at_once = True
    url = f"s3://{BUCKET}/killed"  # of a server that outlives the job
    async with checkpointer(limits=HASTY) as opened:
        await (await opened.save(f"{url}/1", tree))

    store = FaultyStore(opened_bucket())
    async with checkpointer(store, limits=HASTY) as opened:
        hang = store.hang_on("data.sync") if here.rank == here.last else None
        save = await opened.save(f"{url}/2", tree)
        if hang is not None:
            await reached_and_heard(hang)
            os.kill(os.getpid(), signal.SIGKILL)

        told = await told_by(save)
        return {"told": told, "differs": differences(await opened.restore(f"{url}/1", like=tree), tree)}


async def the_primary_stops_saving_to_a_bucket(here: Here) -> Any:
    """Process 0 is stopped when only its own part is absent, and wakes when the others have given it up."""
    tree, told = whole(mesh_of(here.count)), here.folder.parent / "the primary"
    url = f"s3://{BUCKET}/stopped"
    store = FaultyStore(opened_bucket())
    async with checkpointer(store, limits=HASTY) as opened:
        hang = store.hang_on("data.sync") if here.rank == 0 else None
        save = await opened.save(f"{url}/1", tree)
        if hang is not None:
            await reached_and_heard(hang)
            told.write_text(str(os.getpid()))
            # To this thread: another may take one for the process, and this one goes on.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            hang.release()
            return {"told": await told_by(save)}

        try:
            return {"told": await told_by(save), "there": store.kind(f"{url}/1")}
        finally:
            if here.rank == 1:
                os.kill(int(told.read_text()), signal.SIGCONT)


CONVERTED = f"s3://{BUCKET}/converted"
"""Where the sources of conversions are: a server that outlives the job has them."""

RULES = Rules(
    [
        Rename("layers.{i}.w", "blocks.{i}.kernel"),
        Cast("blocks.{i}.kernel", dtype="bfloat16"),
        Stack("blocks.{i:int}.kernel", "blocks.kernel"),
        Split("qkv", ["q", "k", "v"], axis=1),
        Transpose("head"),
    ]
)


def to_convert() -> dict[str, Any]:
    """Return leaves of which each is divided, and small ones, of which each process has some."""
    numbers = np.random.default_rng(0)
    layers = [{"w": numbers.standard_normal((300, 700), np.float32)} for _ in range(4)]
    head, qkv = numbers.standard_normal((700, 900), np.float32), np.arange(33.0).reshape(1, 33)
    return {"layers": layers, "head": head, "qkv": qkv}


async def converts_from_and_to_buckets(here: Here) -> Any:
    """From a bucket to one, to a disk, and back."""
    done = [
        await penstock.convert(source, target, rules=rules)
        for source, target, rules in (
            (f"{CONVERTED}/source", f"{CONVERTED}/made", RULES),
            (f"{CONVERTED}/source", here.folder / "made", RULES),
            (here.folder / "made", f"{CONVERTED}/again", None),
        )
    ]
    with pytest.raises(UnsupportedByStoreError) as refused:
        await penstock.convert(f"{CONVERTED}/source", f"{CONVERTED}/made.safetensors", rules=RULES)

    return {"nbytes": [report.nbytes for report in done], "refused": str(refused.value)}


async def one_dies_converting_to_a_bucket(here: Here) -> Any:
    """The last process is killed while it writes. The last case of a job."""
    here.leaves_at_once = True
    store = FaultyStore(opened_bucket())
    hang = store.hang_on("data.sync") if here.rank == here.last else None
    target, config = f"{CONVERTED}/killed", Config(processes=HASTY)

    async def convert() -> list[Any]:
        return await told_by(
            penstock.convert(f"{CONVERTED}/source", target, rules=RULES, store=store, config=config)
        )

    if hang is None:
        return {"told": await convert(), "there": store.kind(target)}

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(convert)
        await reached_and_heard(hang)
        os.kill(os.getpid(), signal.SIGKILL)

    return {}
