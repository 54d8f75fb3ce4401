"""Saving together, and who writes what."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.processes.job_case import Here, checkpointer
from tests.processes.trees import P, differences, mesh_of, spread, whole

from penstock import SaveFormat
from penstock.config import JobLimits
from penstock.stages.pytree import flatten_tree


async def saves_and_restores(here: Here) -> Any:
    tree = whole(mesh_of(here.count))
    async with checkpointer() as opened:
        report = await (await opened.save(here.folder / "step_1", tree))
        restored = await opened.restore(here.folder / "step_1", like=tree)
        bare = await opened.restore(here.folder / "step_1")
        stream = opened.stream(here.folder / "step_1", like=tree)
        streamed = {keys: leaf async for keys, leaf in stream}
        verified = await opened.verify(here.folder / "step_1")

    assert here.names() == ["step_1"], here.names()
    assert verified.intact, verified.findings
    leaves = {leaf.info.keys: leaf.value for leaf in flatten_tree(tree)[0]}
    return {
        "streamed": differences(streamed, leaves),
        "nbytes": report.nbytes,
        "n_leaves": report.n_leaves,
        "differs": differences(restored, tree),
        "bare": sorted(bare),
        "text": bare["text"],
    }


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
    # No save lasts until its second beat, so that beats are not counted.
    rarely = JobLimits(join_s=40.0, write_s=40.0, silence_s=1000.0, beat_s=400.0)
    async with checkpointer(limits=rarely) as opened:
        coordinator: Any = opened.engine.coordinator
        for step, tree in enumerate([few, many, *[few] * 98]):
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
