"""Steps under Orbax's names, v0's manager and v1, in all processes of a job."""

from __future__ import annotations

import datetime
import shutil
from typing import Any

import anyio
import jax
import numpy as np
from tests.processes.job_case import Here
from tests.processes.trees import SPECS, P, differences, mesh_of, spread, values

from penstock import orbax as ocp
from penstock.errors import PeerFailedError, PlansDifferError
from penstock.orbax import emergency, v1

OVER_ALL = P(("host", "device"))
STRUCT: Any = jax.ShapeDtypeStruct


async def orbaxs_manager_saves_steps(here: Here) -> Any:
    """Steps with items, metrics and a policy of retention, saved and resumed; Orbax's manager reads them."""
    arrays = spread(values(), SPECS, mesh_of(here.count))
    root = here.folder / "run"
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, save_interval_steps=2, best_fn=lambda metrics: metrics["score"], best_mode="max"
    )

    def save() -> dict[str, Any]:
        import orbax.checkpoint as theirs

        found: dict[str, Any] = {}
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), extra=ocp.args.JsonSave({"a": 1}))
        with ocp.CheckpointManager(root, options=options, metadata={"run": 1}) as manager:
            found["saved"] = [
                manager.save(step, args=items, metrics={"score": score})
                for step, score in ((0, 3.0), (1, 9.0), (2, 1.0), (4, 2.0))
            ]
            manager.wait_until_finished()
            found["steps"], found["best"] = list(manager.all_steps()), manager.best_step()
            found["there"] = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
            manager.save(5, args=items, metrics={"score": 0.0}, force=True)
            manager.delete(4)
            found["after deleting"] = list(manager.all_steps())
            found["preempted"] = manager.reached_preemption(5)

        with ocp.CheckpointManager(root, options=options, item_names=("state", "extra")) as manager:
            found["again"], found["root"] = list(manager.all_steps()), manager.metadata().custom_metadata
            wanted = ocp.args.Composite(state=ocp.args.StandardRestore(arrays), extra=ocp.args.JsonRestore())
            got = manager.restore(0, args=wanted)
            found["differs"], found["metrics"] = differences(got.state, arrays), manager.metrics(0)

        with theirs.CheckpointManager(root, item_names=("state", "extra")) as manager:
            found["Orbax's"] = sorted(manager.all_steps())
            args = theirs.args.Composite(
                state=theirs.args.StandardRestore(arrays), extra=theirs.args.JsonRestore()
            )
            read = manager.restore(0, args=args)
            found["by Orbax"] = [*differences(read.state, arrays), *([] if read.extra == {"a": 1} else ["?"])]

        return found

    return await anyio.to_thread.run_sync(save)


async def orbaxs_manager_links_steps(here: Here) -> Any:
    """Steps that share most of their arrays; the last one comes after one that is damaged."""
    mesh, x = mesh_of(here.count), np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    held = {"kept": np.tile(x, (2, 4)), "new": x}
    tree = spread(held, dict.fromkeys(held, OVER_ALL), mesh)

    def linked(step: int) -> list[int]:
        """Return how many steps share each larger file of this process, and how many bytes these have."""
        files = (root / str(step) / "default" / f"ocdbt.process_{here.rank}").rglob("d/*")
        found = [path.stat() for path in files if path.stat().st_size > 1_000]
        return [max(one.st_nlink for one in found), sum(one.st_size for one in found if one.st_nlink == 1)]

    root, found = here.folder / "run", dict[str, Any]()
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)

    def save() -> None:
        with ocp.CheckpointManager(root, item_handlers=handler) as manager:
            for step in (1, 2, 3):
                state = {**tree, **spread({"new": x + step}, {"new": OVER_ALL}, mesh)}
                manager.save(step, args=ocp.args.PyTreeSave(state))
                manager.wait_until_finished()

            found["linked"] = linked(3)
            here.client.wait_at_barrier("all have looked", 30_000)
            if here.rank == 0:
                (root / "3" / "default" / "manifest.ocdbt").write_bytes(b"damaged")

            here.client.wait_at_barrier("it is damaged", 30_000)
            manager.save(4, args=ocp.args.PyTreeSave(tree))
            manager.wait_until_finished()
            found["after damage"] = linked(4)
            wanted = ocp.args.PyTreeRestore(tree, ocp.checkpoint_utils.construct_restore_args(tree))
            found["differs"] = differences(manager.restore(4, args=wanted), tree)

    await anyio.to_thread.run_sync(save)
    return found


async def orbaxs_manager_decides_once(here: Here) -> Any:
    """What processes would decide each in its way: by a function, by the clock; or cannot, in one of them."""
    arrays = spread(values(), SPECS, mesh_of(here.count))

    def odd_only(step: int, latest: int | None) -> bool:
        if step == 6 and here.rank == 0:
            raise LookupError("no such step")

        return step % 2 == 1 if here.rank == 0 else step % 2 == 0

    def fails(metrics: Any) -> float:
        raise LookupError("no such metric") if here.rank == 0 else ZeroDivisionError

    def save() -> dict[str, Any]:
        found: dict[str, Any] = {}
        args = ocp.args.StandardSave(arrays)
        days = datetime.timedelta(days=1 if here.rank == 0 else 0)
        options = ocp.CheckpointManagerOptions(
            should_save_fn=odd_only, max_to_keep=1, keep_time_interval=days
        )
        with ocp.CheckpointManager(here.folder / "function", options=options) as manager:
            found["saved"] = [manager.save(step, args=args) for step in range(1, 6)]
            manager.wait_until_finished()
            found["steps"] = list(manager.all_steps())
            try:
                manager.save(6, args=args)
            except (LookupError, PeerFailedError) as error:
                found["cannot say"] = type(error).__name__

        options = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=fails)
        with ocp.CheckpointManager(here.folder / "policy", options=options) as manager:
            told: list[str] = []
            for step in (1, 2):
                try:
                    manager.save(step, args=args, metrics={"loss": 1.0})
                except (LookupError, PeerFailedError) as error:
                    told.append(type(error).__name__)

            found["policy"] = [told, list(manager.all_steps())]

        with ocp.CheckpointManager(here.folder / "failing") as manager:
            try:
                manager.save(1, args=ocp.args.StandardSave({**arrays, "own": np.full(3, here.rank)}))
                manager.wait_until_finished()
            except PlansDifferError as error:
                found["differs"] = error.differences[0].split(":")[0]

            found["left"] = list(manager.all_steps())
            found["then"] = manager.save(1, args=args)

        return found

    return await anyio.to_thread.run_sync(save)


async def orbaxs_v1_saves(here: Here) -> Any:
    """Trees and checkpointables by v1, at once and in the background, and its steps."""
    arrays = spread(values(), SPECS, mesh_of(here.count))
    del arrays["empty"]  # which v1 refuses
    tree = {**arrays, "number": 7, "text": "hello"}

    def save() -> dict[str, Any]:
        from orbax.checkpoint.experimental import v1 as theirs

        found: dict[str, Any] = {}
        path = here.folder / "tree"
        v1.save(path, tree, custom_metadata={"a": 1})
        v1.save(path, tree, overwrite=True)
        found["tree"] = differences(v1.load(path, tree), tree)
        items = {"state": arrays, "extra": {"step": 7}}
        v1.save_checkpointables_async(here.folder / "items", items).result()
        got = v1.load_checkpointables(here.folder / "items", {"state": arrays, "extra": None})
        found["items"] = [*differences(got["state"], arrays), got["extra"]]
        with v1.training.Checkpointer(here.folder / "run") as checkpointer:
            found["steps"] = [checkpointer.save(step, arrays, metrics={"loss": 1.0}) for step in (1, 2)]
            response = checkpointer.save_async(3, arrays, force=True)
            found["saved"] = response is not None and response.result()
            found["latest"] = checkpointer.latest.step if checkpointer.latest else None
            found["loaded"] = differences(checkpointer.load(3, arrays), arrays)

        try:
            v1.save_checkpointables(here.folder / "odd", {"state": arrays, "extra": {"rank": here.rank}})
        except PlansDifferError as error:
            found["differs"] = error.differences[0]

        context = v1.Context(multiprocessing_options=v1.options.MultiprocessingOptions(primary_host=None))
        with context:
            local = {"x": jax.numpy.arange(3) + here.rank}
            v1.save(here.folder / f"own {here.rank}", local)
            found["own"] = int(v1.load(here.folder / f"own {here.rank}", local)["x"][0])

        partly = theirs.Context()
        partly.pytree.loading.partial_load = True
        with partly:
            found["by Orbax"] = differences(theirs.load(str(path), arrays), arrays)

        found["there"] = [name for name in here.names() if not name.startswith("own")]
        return found

    return await anyio.to_thread.run_sync(save)


async def orbaxs_emergency_manager_saves(here: Here) -> Any:
    """Each process has a local directory; then one of them is lost; Orbax reads what is persistent."""
    mesh, x = mesh_of(here.count), np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    local, persistent = here.folder / f"disk {here.rank}", here.folder / "persistent"

    def state(step: int) -> Any:
        return spread({"w": x + step, "all": x[:4] - step}, {"w": OVER_ALL, "all": P()}, mesh)

    def opened() -> emergency.CheckpointManager:
        options = emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(save_interval_steps=2, max_to_keep=2),
            persistent=emergency.PersistentCheckpointOptions(save_interval_steps=6),
        )
        abstract = jax.tree.map(lambda leaf: STRUCT(leaf.shape, leaf.dtype, sharding=leaf.sharding), state(0))
        return emergency.CheckpointManager(local, persistent, mesh, abstract, options=options)

    def save() -> dict[str, Any]:
        import orbax.checkpoint as theirs

        found: dict[str, Any] = {}
        with opened() as manager:
            args = [ocp.args.Composite(state=ocp.args.PyTreeSave(state(step))) for step in range(11)]
            found["saved"] = [step for step in range(11) if manager.save(step, args[step])]
            manager.wait_until_finished()
            found["steps"] = list(manager.all_steps())
            found["differs"] = differences(manager.restore(None).state, state(10))

        found["local"] = sorted(path.name for path in local.iterdir() if path.name.isdigit())
        found["persistent"] = sorted(path.name for path in persistent.iterdir() if path.name.isdigit())
        with opened() as manager:
            found["resumed"] = [manager.latest_step(), differences(manager.restore(None).state, state(10))]
            manager.wait_until_finished()

        here.client.wait_at_barrier("all have left", 30_000)
        if here.rank == here.last:
            shutil.rmtree(local)

        here.client.wait_at_barrier("it is lost", 30_000)
        with opened() as manager:
            step = manager.latest_step()
            found["after a loss"] = [step, differences(manager.restore(None).state, state(step or 0))]

        newest = max(int(path.name) for path in persistent.iterdir() if path.name.isdigit())
        with theirs.PyTreeCheckpointer() as reader:
            wanted = theirs.checkpoint_utils.construct_restore_args(state(newest))
            read = reader.restore(persistent / str(newest) / "state", restore_args=wanted)

        found["by Orbax"] = differences(read, state(newest))
        return found

    return await anyio.to_thread.run_sync(save)


async def orbaxs_replicator_manager_saves(here: Here) -> Any:
    """Each process has a local directory, from where another service would copy its part."""
    mesh, x = mesh_of(here.count), np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    local = here.folder / f"disk {here.rank}"

    def state(step: int) -> Any:
        return spread({"w": x + step, "all": x[:4] - step}, {"w": OVER_ALL, "all": P()}, mesh)

    def opened() -> emergency.ReplicatorCheckpointManager:
        options = emergency.ReplicatorCheckpointManagerOptions(save_interval_steps=2)
        return emergency.ReplicatorCheckpointManager(local, options, global_mesh=mesh)

    def save() -> dict[str, Any]:
        found: dict[str, Any] = {}
        with opened() as manager:
            args = [ocp.args.Composite(state=ocp.args.PyTreeSave(state(step))) for step in range(4)]
            found["saved"] = [step for step in range(4) if manager.save(step, args[step])]
            manager.wait_until_finished()
            found["steps"] = list(manager.all_steps())

        with opened() as manager:
            wanted = ocp.checkpoint_utils.construct_restore_args(state(2))
            asked = ocp.args.Composite(state=ocp.args.PyTreeRestore(state(0), restore_args=wanted))
            found["resumed"] = [manager.latest_step(), differences(manager.restore(2, asked).state, state(2))]

        found["there"] = sorted(path.name for path in local.iterdir() if path.name.isdigit())
        return found

    return await anyio.to_thread.run_sync(save)
