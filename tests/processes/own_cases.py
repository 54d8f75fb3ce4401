"""What each process has for itself, saved together with what is shared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.processes.job_case import Here, checkpointer
from tests.processes.trees import P, differences, mesh_of, spread

from penstock import PerProcess, SaveArgs, SaveFormat
from penstock.errors import InvalidLeafError, PeerError, StructureMismatchError
from penstock.items import Composite, Json

FORMATS = {
    "plain": SaveFormat(),
    "directories": SaveFormat(ocdbt=False, zarr=3),
    "zstd": SaveFormat(codec="zstd"),
    "tuples": SaveFormat(rich_types=True),
}


def own(rank: int) -> dict[str, Any]:
    """Return the state of a process's data iterator; no two have the same structure."""
    return {
        "position": 100 + rank,
        "shard": f"shard {rank}",
        "buffer": np.arange(1000 + rank, dtype=np.int32),
        "key": jax.random.key(rank),
        "here": jnp.arange(3) + rank,
        "pair": (rank, None),
        f"only in {rank}": np.float32(rank),
    }


def state(here: Here) -> dict[str, Any]:
    """Return a tree whose middle is of this process alone."""
    mesh = mesh_of(here.count)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {
        "a": spread(x, P("host"), mesh),
        "iterator": PerProcess(own(here.rank)),
        "step": 7,
        "w": spread(x + 1, P(), mesh),
    }


def not_called(values: Any, index: int, count: int) -> Any:
    raise AssertionError("as many processes restore as have saved")


async def each_keeps_its_own(here: Here) -> Any:
    tree, found = state(here), {}
    for name, form in FORMATS.items():
        path = here.folder / name
        async with checkpointer(save_format=form) as opened:
            await (await opened.save(path, {**tree, "step": 6}))
            await (await opened.save(path, tree, overwrite=True))
            found[name] = differences(await opened.restore(path, like=tree), tree)
            anything: dict[str, Any] = {**tree, "iterator": PerProcess(None, not_called)}
            back = await opened.restore(path, like=anything)
            shown: dict[str, Any] = {**back["iterator"].value, "pair": tuple(back["iterator"].value["pair"])}
            number = f"only in {here.rank}"  # stored as a number: only a target says of which type
            shown[number] = np.float32(shown[number])
            found[f"{name}, unknown"] = differences(shown, tree["iterator"].value)
            assert (await opened.verify(path)).intact

    async with checkpointer() as opened:
        path = here.folder / "items"
        save_args = {"state": {"iterator": PerProcess({"buffer": SaveArgs(chunk_byte_size=1000)})}}
        items = Composite(state=tree, more={"own": PerProcess(here.rank)}, notes=Json(1))
        await (await opened.save(path, items, save_args=save_args))
        like = {"state": tree, "more": {"own": PerProcess(0)}}
        back = await opened.restore_items(path, like=like)
        found["items"] = differences(back["state"], tree)
        assert back["more"]["own"].value == here.rank

    return found


async def what_is_of_one_process_is_checked(here: Here) -> Any:
    """One marks what another does not, or what is spread, or restores what another number of them saved."""
    tree, told = state(here), {}
    unmarked = {**tree, "iterator": own(0)} if here.rank == here.last else tree
    marked = {**tree, "a": PerProcess(tree["a"])}
    async with checkpointer() as opened:
        for name, wrong in (("unmarked", unmarked), ("spread", marked)):
            try:
                await (await opened.save(here.folder / name, wrong))
            except (PeerError, InvalidLeafError) as error:  # whoever is first ends it for all
                told[name] = str(error)

            await here.meet(name)

        # As one process more would have saved it.
        others = [{f"process_{rank}-of-{here.count + 1}": {"n": rank} for rank in range(here.count + 1)}]
        await (await opened.save(here.folder / "more", {"iterator": others[0]}))
        try:
            await opened.restore(here.folder / "more", like={"iterator": PerProcess({"n": 0})})
        except StructureMismatchError as error:
            told["number"] = str(error)

        def divide(values: Any, index: int, count: int) -> Any:
            return [value["n"] for value in values][index::count]

        divided = await opened.restore(here.folder / "more", like={"iterator": PerProcess(0, divide)})

    return {"told": told, "divided": divided["iterator"].value, "there": here.names()}
