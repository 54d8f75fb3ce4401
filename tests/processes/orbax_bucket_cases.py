"""Saves to a bucket under Orbax's names, v0 and v1, in all processes of a job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import numpy as np
from tests.processes.bucket_cases import bucket, left_over
from tests.processes.job_case import Here
from tests.processes.trees import SPECS, differences, mesh_of, spread, values

from penstock import orbax as ocp
from penstock.errors import PenstockError
from penstock.orbax import v1


async def orbaxs_names_save_to_a_bucket(here: Here) -> Any:
    """One tree by each checkpointer, one of them twice; and what is refused."""
    arrays = spread(values(), SPECS, mesh_of(here.count))
    tree = {**arrays, "numpy": np.arange(6.0), "number": 7}

    def save(url: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with ocp.PyTreeCheckpointer() as opened:
            opened.save(f"{url}/sync", {**tree, "number": 6}, custom_metadata={"a": 1})
            opened.save(f"{url}/sync", tree, force=True)
            args = ocp.args.PyTreeRestore(tree, ocp.checkpoint_utils.construct_restore_args(tree))
            found["sync"] = differences(opened.restore(f"{url}/sync", args=args), tree)
            found["differs"] = _told(lambda: opened.save(f"{url}/differs", {"x": np.full(3, here.rank)}))

        with ocp.StandardCheckpointer() as opened:
            for place in (url, here.folder):
                here.client.wait_at_barrier(f"the primary fails in {place}", 30_000)
                odd = {"x": object() if here.rank == 0 else 1.0}
                save_odd = partial(opened.save, f"{place}/fails", odd)
                found.setdefault("fails", []).append(_told(save_odd) or _told(opened.wait_until_finished))

            opened.save(f"{url}/standard", arrays, custom_metadata={"a": 1})
            opened.wait_until_finished()
            found["standard"] = differences(opened.restore(f"{url}/standard", arrays), arrays)
            found["custom"] = opened.metadata(f"{url}/standard").custom_metadata

        handler, whole = ocp.PyTreeCheckpointHandler(), ocp.args.PyTreeSave(arrays)
        for name, active in (("all", {*range(here.count)}), ("some", {0, 1})):
            chosen = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=active)
            with ocp.Checkpointer(handler, multiprocessing_options=chosen) as opened:
                found[name] = _told(partial(opened.save, f"{url}/{name}", args=whole))

        own = ocp.options.MultiprocessingOptions(primary_host=None)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=own) as opened:
            path = f"{url}/own {here.rank}"
            opened.save(path, args=ocp.args.PyTreeSave({"rank": here.rank}))
            found["own"] = opened.restore(path)["rank"]

        return found

    async with bucket(here) as url:
        found = await anyio.to_thread.run_sync(save, url)
        await here.meet("saved")
        found["left"] = left_over(url)
        return found


async def orbaxs_managers_save_to_a_bucket(here: Here) -> Any:
    """Steps with items, metrics and a policy of retention, by both managers."""
    arrays = spread(values(), SPECS, mesh_of(here.count))
    del arrays["empty"]  # which v1 refuses

    def save(url: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["score"])
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), extra=ocp.args.JsonSave({"a": 1}))
        with ocp.CheckpointManager(f"{url}/run", options=options, metadata={"run": 1}) as manager:
            for step, score in ((1, 3.0), (2, 1.0), (3, 2.0)):
                manager.save(step, args=items, metrics={"score": score})

            manager.wait_until_finished()
            found["steps"], found["best"] = list(manager.all_steps()), manager.best_step()
            wanted = ocp.args.Composite(state=ocp.args.StandardRestore(arrays), extra=ocp.args.JsonRestore())
            got = manager.restore(3, args=wanted)
            found["state"], found["extra"] = differences(got.state, arrays), got.extra
            here.client.wait_at_barrier("all have restored", 30_000)
            manager.delete(3)

        with ocp.CheckpointManager(f"{url}/run", options=options) as manager:
            found["again"], found["root"] = list(manager.all_steps()), manager.metadata().custom_metadata

        keep = v1.training.preservation_policies.LatestN(1)
        with v1.training.Checkpointer(f"{url}/newer", preservation_policy=keep) as opened:
            opened.save(1, arrays)
            opened.save_checkpointables(2, {"state": arrays, "extra": {"a": 2}})
            found["newer"] = [one.step for one in opened.checkpoints]
            loaded = opened.load_checkpointables(2, {"state": arrays, "extra": None})
            found["loaded"] = [*differences(loaded["state"], arrays), loaded["extra"]]

        path = f"{url}/items"
        found["items"] = _told(lambda: v1.save_checkpointables(path, {"extra": {"rank": here.rank}}))
        return found

    async with bucket(here) as url:
        found = await anyio.to_thread.run_sync(save, url)
        await here.meet("saved")
        found["left"] = left_over(url)
        return found


def _told(save: Callable[[], object]) -> list[str]:
    try:
        save()
    except (PenstockError, ValueError) as error:
        return [type(error).__name__, str(error)]

    return []
