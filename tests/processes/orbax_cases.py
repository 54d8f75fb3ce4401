"""Orbax beside us, and its names in penstock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import numpy as np
from etils import epath
from tests.processes.job_case import Here
from tests.processes.trees import SPECS, differences, mesh_of, spread, values, whole

from penstock.errors import PlansDifferError


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


async def orbax_v1_reads(here: Here) -> Any:
    """Do the same by Orbax v1."""
    from orbax.checkpoint.experimental import v1 as ocp

    tree = spread(values(), SPECS, mesh_of(here.count))
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        found = ocp.load(str(here.folder.parent / "saves_and_restores" / "step_1"), tree)

    return {"differs": differences(found, tree)}


async def orbaxs_names_save_together(here: Here) -> Any:
    """Save by each checkpointer of one tree, twice, and restore by it and by Orbax."""
    mesh = mesh_of(here.count)
    arrays = spread(values(), SPECS, mesh)
    tree = {**arrays, "numpy": np.arange(6.0), "number": 7}

    def save() -> dict[str, Any]:
        import orbax.checkpoint as theirs

        import penstock.orbax as ocp

        found: dict[str, Any] = {}
        path = here.folder / "sync"
        with ocp.PyTreeCheckpointer() as opened:
            opened.save(path, {**tree, "number": 6}, custom_metadata={"a": 1})
            opened.save(path, tree, force=True)
            args = ocp.args.PyTreeRestore(tree, ocp.checkpoint_utils.construct_restore_args(tree))
            found["sync"] = differences(opened.restore(path, args=args), tree)

        path = here.folder / "standard"
        with ocp.StandardCheckpointer() as opened:
            opened.save(path, arrays, custom_metadata={"a": 1})
            opened.wait_until_finished()
            found["standard"] = differences(opened.restore(path, arrays), arrays)
            found["custom"] = opened.metadata(path).custom_metadata

        path = here.folder / "async"
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        with ocp.AsyncCheckpointer(handler) as opened:
            opened.save(path, args=ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=8192))
            opened.save(here.folder / "async 2", args=ocp.args.PyTreeSave(arrays))
            opened.wait_until_finished()
            args = ocp.args.PyTreeRestore(arrays, ocp.checkpoint_utils.construct_restore_args(arrays))
            found["async"] = differences(opened.restore(path, args=args), arrays)

        for name in ("standard", "async", "async 2"):
            wanted = theirs.checkpoint_utils.construct_restore_args(arrays)
            args = theirs.args.PyTreeRestore(arrays, restore_args=wanted)
            read = theirs.PyTreeCheckpointer().restore(here.folder / name, args=args)
            found[f"{name}, by Orbax"] = differences(read, arrays)

        return found

    return {**await anyio.to_thread.run_sync(save), "there": here.names()}


async def orbaxs_names_refuse_what_they_cannot(here: Here) -> Any:
    """What they have no way yet to save together, so no process may wait for another."""

    def save() -> dict[str, str]:
        import penstock.orbax as ocp

        told: dict[str, str] = {}
        tree = whole(mesh_of(here.count))
        # Each at a path of its own: of two that build in one place, the second is refused for that.
        path = here.folder / f"step_{here.rank}"
        in_place = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
        cases: dict[str, dict[str, Any]] = {
            "primary": {"multiprocessing_options": ocp.options.MultiprocessingOptions(primary_host=1)},
            "mode": {"file_options": ocp.options.FileOptions(path_permission_mode=0o700)},
            "in place": {"atomicity_options": in_place},
        }
        for name, options in cases.items():
            try:
                ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), **options).save(path, tree)
            except ValueError as error:
                told[name] = str(error)

        return told

    told = await anyio.to_thread.run_sync(save)
    await here.meet("all are refused")
    return {"told": told, "there": here.names()}


async def orbaxs_names_tell_of_a_failure(here: Here) -> Any:
    """One process saves another tree than the others."""

    def save() -> str:
        import penstock.orbax as ocp

        tree = {"x": np.arange(3) + here.rank}
        with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as opened:
            try:
                opened.save(here.folder / "x", args=ocp.args.PyTreeSave(tree))
                opened.wait_until_finished()
            except PlansDifferError as error:
                return error.differences[0]

        return "saved"

    return {"told": await anyio.to_thread.run_sync(save), "there": here.names()}


async def handlers_are_called_directly(here: Here) -> Any:
    """Call type handlers themselves in each process, merge, and read by them and by Orbax's."""
    import orbax.checkpoint as theirs

    import penstock.orbax as ocp

    tree = spread(values(), SPECS, mesh_of(here.count))
    tree = {name: tree[name] for name in ("rows", "both", "replicated")}
    path = here.folder / "direct"
    path.mkdir(parents=True, exist_ok=True)

    context = ocp.type_handlers.get_ts_context()

    def infos(library: Any) -> list[Any]:
        return [
            library.ParamInfo(
                name=name,
                keypath=(),
                parent_dir=epath.Path(path),
                is_ocdbt_checkpoint=True,
                use_zarr3=False,
                ts_context=context,
            )
            for name in tree
        ]

    def found_by(read: Sequence[Any]) -> list[str]:
        return differences(dict(zip(tree, read, strict=True)), tree)

    handler, found = ocp.type_handlers.ArrayHandler(), dict[str, Any]()
    for future in await handler.serialize(list(tree.values()), infos(ocp.type_handlers)):
        await anyio.to_thread.run_sync(future.result)

    spec = ocp.type_handlers.get_json_tspec_write(
        infos(ocp.type_handlers)[0], True, (4,), (4,), np.dtype(np.int32), here.rank
    )
    found["place"] = spec["kvstore"]["base"]["path"].removeprefix(str(path))
    await here.meet("written")
    found["there"] = sorted(each.name for each in path.iterdir() if each.name.startswith("ocdbt."))
    if here.rank == 0:
        await ocp.type_handlers.merge_ocdbt_per_process_files(path, context, use_zarr3=False)

    await here.meet("merged")

    async def read_by(library: Any) -> Any:
        args = [library.ArrayRestoreArgs(sharding=value.sharding) for value in tree.values()]
        return await library.ArrayHandler().deserialize(infos(library), args)

    def on_asyncio() -> Any:
        return anyio.run(partial(read_by, theirs.type_handlers), backend="asyncio")

    found["ours"] = found_by(await read_by(ocp.type_handlers))
    found["theirs"] = found_by(await anyio.to_thread.run_sync(on_asyncio))
    return found


async def each_process_is_primary(here: Here) -> Any:
    """Who records shardings, and what each saves by itself where every process is the primary one."""
    import jax

    import penstock.orbax as ocp

    value = jax.numpy.arange(4.0) + here.rank  # of this process alone

    async def recorded(primary_host: int | None) -> bool:
        path = here.folder / f"by {primary_host} in {here.rank}"
        path.mkdir(parents=True)
        info = ocp.type_handlers.ParamInfo(
            name="x", parent_dir=epath.Path(path), is_ocdbt_checkpoint=False, use_zarr3=False
        )
        handler = ocp.type_handlers.ArrayHandler(primary_host=primary_host, replica_id=None)
        for future in await handler.serialize([value], [info], [ocp.SaveArgs()]):
            await anyio.to_thread.run_sync(future.result)

        return (path / "_sharding").exists()

    def alone() -> Any:
        each = ocp.options.MultiprocessingOptions(primary_host=None)
        path = here.folder / f"own {here.rank}"
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=each)
        with ocp.Checkpointer(handler, multiprocessing_options=each) as opened:
            opened.save(path, {"x": value, "rank": here.rank})
            found = opened.restore(path)

        return [found["rank"], differences({"x": found["x"]}, {"x": value})]

    told = {str(primary): await recorded(primary) for primary in (0, 1, None)}
    return {"recorded": told, "own": await anyio.to_thread.run_sync(alone)}
