"""Several items as one checkpoint, under Orbax's names, saved by all processes of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import jax
import numpy as np
from tests.processes.job_case import Here
from tests.processes.some_cases import mesh_over
from tests.processes.trees import SPECS, P, differences, mesh_of, spread, values

from penstock import orbax as ocp
from penstock.errors import InactiveProcessError, PeerFailedError, PlansDifferError
from penstock.orbax import type_handlers


class OwnHandler(ocp.CheckpointHandler):
    """A user's handler: every process writes a file, and there is a tree beside it."""

    def __init__(self, rank: int, fails_in: int | None = None) -> None:
        self._rank = rank
        self._fails_in = fails_in
        self._tree = ocp.PyTreeCheckpointHandler()

    def save(self, directory: Any, args: OwnSave) -> None:
        if self._rank == self._fails_in:
            raise LookupError("no such thing")

        (directory / f"part_{self._rank}").write_text(args.text)
        (directory / "tree").mkdir(exist_ok=True)
        self._tree.save(directory / "tree", args=ocp.args.PyTreeSave(args.tree))

    def restore(self, directory: Any, args: OwnRestore) -> Any:
        return sorted(path.name for path in directory.iterdir() if path.name.startswith("part"))

    def finalize(self, directory: Any) -> None:
        names = sorted(path.name for path in directory.iterdir())
        (directory / "part_all").write_text(" ".join(names))

    def close(self) -> None:
        self._tree.close()


@ocp.args.register_with_handler(OwnHandler, for_save=True)
@dataclass
class OwnSave(ocp.args.CheckpointArgs):
    text: str
    tree: Any


@ocp.args.register_with_handler(OwnHandler, for_restore=True)
@dataclass
class OwnRestore(ocp.args.CheckpointArgs):
    pass


async def orbaxs_names_save_items(here: Here) -> Any:
    """Save items of each kind, twice, and restore them, also by Orbax."""
    arrays = spread(values(), SPECS, mesh_of(here.count))
    key = jax.random.key(3)
    args = ocp.args

    def save() -> dict[str, Any]:
        import orbax.checkpoint as theirs

        items = args.Composite(
            state=args.StandardSave(arrays),
            tree=args.PyTreeSave({**arrays, "numpy": np.arange(6.0)}, custom_metadata={"c": 1}),
            extra=args.JsonSave({"step": 7}),
            one=args.ArraySave(arrays["rows"]),
            key=args.JaxRandomKeySave(key),
            state_of_numpy=args.NumpyRandomKeySave(np.random.RandomState(0).get_state()),
            own=OwnSave(f"of {here.rank}", {"rows": arrays["rows"]}),
        )
        path, found = here.folder / "step", dict[str, Any]()
        restored = ocp.checkpoint_utils.construct_restore_args(arrays)
        handler = ocp.CompositeCheckpointHandler(*set(items) - {"own"}, own=OwnHandler(here.rank))
        with ocp.AsyncCheckpointer(handler) as opened:
            opened.save(path, args=args.Composite(extra=args.JsonSave({"step": 6})))
            opened.save(path, args=items, force=True, custom_metadata={"a": 1})
            opened.wait_until_finished()
            wanted = args.Composite(
                state=args.StandardRestore(arrays),
                tree=args.PyTreeRestore(arrays, restored, partial_restore=True),
                extra=args.JsonRestore(),
                key=args.JaxRandomKeyRestore(),
                own=OwnRestore(),
            )
            got = opened.restore(path, args=wanted)
            found["state"] = differences(got.state, arrays)
            found["tree"] = differences(got.tree, arrays)
            raw = [np.asarray(jax.random.key_data(each)) for each in (got.key, key) if not here.rank]
            found["key"] = differences(raw[:1], raw[1:])  # it comes back to where process 0 had it
            found["extra"], found["own"] = got.extra, got.own
            about = opened.metadata(path)
            found["custom"] = about.custom_metadata
            found["items"] = sorted(about.item_handlers or ())

        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as opened:
            opened.save(here.folder / "one", args=args.Composite(x=args.JsonSave({"n": here.count})))

        found["there"] = here.names()
        theirs_args = theirs.args.Composite(
            state=theirs.args.StandardRestore(arrays),
            tree=theirs.args.PyTreeRestore(arrays, restore_args=_theirs(arrays), partial_restore=True),
            extra=theirs.args.JsonRestore(),
            one=theirs.args.ArrayRestore(restore_args=_theirs(arrays)["rows"]),
        )
        by_orbax = theirs.Checkpointer(theirs.CompositeCheckpointHandler()).restore(path, args=theirs_args)
        found["by Orbax"] = [
            *differences(by_orbax.state, arrays),
            *differences(by_orbax.tree, arrays),
            *differences(by_orbax.one, arrays["rows"]),
            *([] if by_orbax.extra == {"step": 7} else ["extra"]),
        ]
        return found

    return await anyio.to_thread.run_sync(save)


async def orbaxs_items_that_differ_are_refused(here: Here) -> Any:
    """Another value, or another item, in one process than in the others."""

    def save() -> list[str]:
        told: list[str] = []
        odd = here.rank == here.last
        each = (
            ocp.args.Composite(extra=ocp.args.JsonSave({"step": 7 + odd})),
            ocp.args.Composite(**{"b" if odd else "a": ocp.args.JsonSave({})}),
        )
        with ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler()) as opened:
            for items in each:
                try:
                    opened.save(here.folder / "x", args=items)
                    opened.wait_until_finished()  # a process may be staged before it hears of it
                except PlansDifferError as error:
                    told.append("; ".join(error.differences))

        return told

    told = await anyio.to_thread.run_sync(save)
    await here.meet("all have ended")  # the primary removes what was written
    return {"told": told, "there": here.names()}


async def a_handler_fails_in_one_process(here: Here) -> Any:
    """One handler of the last process raises, before or beside a tree of all; then all save that path."""
    arrays = spread(values(), SPECS, mesh_of(here.count))
    own = OwnSave("x", {"rows": arrays["rows"]})

    def save(first: str) -> list[Any]:
        items = ocp.args.Composite(**{first: own, "b": ocp.args.PyTreeSave(arrays)})
        told: list[Any] = []
        for fails_in in (here.last, None):
            own_handler: dict[str, Any] = {first: OwnHandler(here.rank, fails_in)}
            handler = ocp.CompositeCheckpointHandler("b", **own_handler)
            try:
                with ocp.AsyncCheckpointer(handler) as opened:
                    opened.save(here.folder / f"step {first}", args=items)
                    opened.wait_until_finished()
                told.append("saved")
            except LookupError:
                told.append("raised")
            except PeerFailedError as error:
                told.append([*error.processes, error.reason])

        return told

    def save_alone() -> list[Any]:
        told: list[Any] = []
        with ocp.Checkpointer(OwnHandler(here.rank, here.last)) as opened:
            try:
                opened.save(here.folder / "alone", args=own)
            except LookupError:
                told.append("raised")
            except PeerFailedError as error:
                told.append([*error.processes, error.reason])

        return told

    found = {first: await anyio.to_thread.run_sync(save, first) for first in ("a", "c")}
    found["alone"] = await anyio.to_thread.run_sync(save_alone)
    await here.meet("all have ended")  # the primary removes what was written
    return {**found, "there": here.names()}


def _theirs(tree: Any) -> Any:
    import orbax.checkpoint as theirs

    return theirs.checkpoint_utils.construct_restore_args(tree)


async def orbaxs_array_options_hold_together(here: Here) -> Any:
    """Which replica writes what, and which documents there are."""
    mesh = mesh_of(here.count)
    tree = {name: array for name, array in spread(values(), SPECS, mesh).items() if name != "empty"}

    of_last = 2 * here.last  # a replica on the last process
    options: dict[str, dict[str, Any]] = {
        "one": {"use_replica_parallel": False},
        "last": {"use_replica_parallel": False, "replica_id": of_last},
        "two": {"max_replicas_for_replica_parallel": 2, "min_slice_bytes_for_replica_parallel": 1},
        "bare": {"enable_write_sharding_file": False},
        "recorded": {"array_metadata_store": type_handlers.Store()},
    }

    def save() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, given in options.items():
            handlers = ocp.type_handlers.create_type_handler_registry(
                (jax.Array, ocp.type_handlers.ArrayHandler(**given))
            )
            item = {"replicated": tree["replicated"]} if name in ("one", "last", "two") else tree
            handler = ocp.PyTreeCheckpointHandler(type_handler_registry=handlers, use_compression=False)
            with ocp.AsyncCheckpointer(handler) as opened:
                opened.save(path := here.folder / name, args=ocp.args.PyTreeSave(item))
                opened.wait_until_finished()
                args = ocp.args.PyTreeRestore(item, _ours(item))
                found[name] = differences(opened.restore(path, args=args), item)

            found[f"bytes of {name}"] = [
                sum(file.stat().st_size for file in (path / f"ocdbt.process_{rank}").glob("d/*"))
                for rank in range(here.count)
            ]
            found[f"in {name}"] = sorted(file.name for file in path.iterdir())

        return found

    return await anyio.to_thread.run_sync(save)


def _ours(tree: Any) -> Any:
    return ocp.checkpoint_utils.construct_restore_args(tree)


async def orbaxs_names_save_from_some(here: Here) -> Any:
    """Processes 1 and 2 of three save items and steps; process 0 is told that it takes no part."""
    some = ocp.options.MultiprocessingOptions(primary_host=1, active_processes={1, 2})
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    handler = ocp.CompositeCheckpointHandler()

    def save() -> str:
        with ocp.AsyncCheckpointer(handler, multiprocessing_options=some) as opened:
            try:
                opened.save(here.folder / "step", args=ocp.args.Composite(**items()))
            except InactiveProcessError as error:
                return str(error)

        with ocp.PyTreeCheckpointer() as opened:
            as_numpy = {"x": ocp.RestoreArgs(restore_type=np.ndarray)}
            found = opened.restore(here.folder / "step" / "state", restore_args=as_numpy)

        options = ocp.CheckpointManagerOptions(multiprocessing_options=some, max_to_keep=1)
        with ocp.CheckpointManager(here.folder / "run", options=options) as manager:
            for step in (1, 2):
                manager.save(step, args=ocp.args.Composite(**items()))

            manager.wait_until_finished()
            return f"{(found['x'] == x).all()} {list(manager.all_steps())}"

    def items() -> dict[str, Any]:
        state = spread({"x": x}, {"x": P("host")}, mesh_over((1, 2))) if here.rank else {"x": x}
        return {"state": ocp.args.PyTreeSave(state), "extra": ocp.args.JsonSave({"a": 1})}

    told = await anyio.to_thread.run_sync(save)
    await here.meet("all have ended")
    return {"told": told, "there": here.names()}
