"""Saves of which a base holds a part already."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from tests.processes.job_case import Here, checkpointer
from tests.processes.trees import P, differences, mesh_of, spread

from penstock import PerProcess, SaveFormat
from penstock.errors import PeerError, StorageError
from penstock.handlers import LocalStore
from penstock.testing import FaultyStore

FORMATS = {"plain": SaveFormat(), "directories": SaveFormat(ocdbt=False), "zarr3": SaveFormat(zarr=3)}
SPECS = {"rows": P(("host", "device")), "columns": P(None, "host"), "all": P(), "large": P()}


def state(here: Here, step: int) -> dict[str, Any]:
    """Return arrays that are all new."""
    x = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) + step
    held = {"rows": x, "columns": x + 1, "all": x + 2, "large": np.tile(x, (8, 16))}
    return {
        **spread(held, SPECS, mesh_of(here.count)),
        "local": jnp.arange(100.0) + step,
        "numpy": np.arange(10) + step,
        "own": PerProcess(jnp.arange(50 + here.rank)),
    }


async def what_a_base_holds_is_linked(here: Here) -> Any:
    """Three saves in a row, of which each shares most of its arrays with the one before."""
    found: dict[str, Any] = {}
    for name, form in FORMATS.items():
        folder = here.folder / name
        trees = [state(here, 0)]
        trees.append({**trees[0], "rows": state(here, 1)["rows"]})
        trees.append({**trees[1], "all": state(here, 2)["all"]})
        reports: list[Any] = []
        async with checkpointer(save_format=form) as opened:
            for step, tree in enumerate(trees):
                base = None if step == 0 else folder / str(step - 1)
                report = await (await opened.save(folder / str(step), tree, base=base))
                reports.append([report.nbytes, report.nbytes_kept])

            if here.rank == 0:  # each is whole by itself
                LocalStore().remove_tree(str(folder / "0"))

            await here.meet(name)
            for step in (1, 2):
                restored = await opened.restore(folder / str(step), like=trees[step])
                assert differences(restored, trees[step]) == []
                assert (await opened.verify(folder / str(step))).intact

        found[name] = reports

    return found


async def what_has_the_same_bytes_is_linked(here: Here) -> Any:
    """The same by digests, of new objects with equal values and with a Checkpointer that knows nothing."""
    reports: list[Any] = []
    for step in (0, 1):
        tree = {**state(here, 0), "rows": state(here, step)["rows"]}
        async with checkpointer() as opened:
            base = here.folder / "0" if step else None
            save = await opened.save(here.folder / str(step), tree, base=base, compare="digest")
            report = await save
            reports.append([report.nbytes, report.nbytes_kept])
            assert differences(await opened.restore(here.folder / str(step), like=tree), tree) == []

    return reports


async def what_differs_in_a_base_is_written(here: Here) -> Any:
    """A bit flips in what the last process wrote of the base."""
    tree = state(here, 0)
    async with checkpointer() as opened:
        await (await opened.save(here.folder / "0", tree))
        if here.rank == here.last:
            own = here.folder / "0" / f"ocdbt.process_{here.rank}" / "d"
            file = max(own.iterdir(), key=lambda one: one.stat().st_size)
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            with file.open("r+b") as damaged:
                damaged.write(data)

        report = await (await opened.save(here.folder / "1", tree, base=here.folder / "0"))
        assert differences(await opened.restore(here.folder / "1", like=tree), tree) == []
        assert (await opened.verify(here.folder / "1")).intact

    return [report.nbytes, report.nbytes_kept]


async def what_cannot_be_linked_is_written(here: Here) -> Any:
    """Where one process cannot link, it writes; where it cannot any more, the save ends for all."""
    tree, told = state(here, 0), dict[str, Any]()
    store = FaultyStore(LocalStore())
    async with checkpointer(store) as opened:
        await (await opened.save(here.folder / "0", tree))
        if here.rank == here.last:
            store.fail_on("share")
        report = await (await opened.save(here.folder / "1", tree, base=here.folder / "0"))
        told["first"] = [report.nbytes, report.nbytes_kept]
        assert differences(await opened.restore(here.folder / "1", like=tree), tree) == []

    store = FaultyStore(LocalStore())
    async with checkpointer(store) as opened:
        again = await opened.restore(here.folder / "1", like=tree)
        if here.rank == 0:  # what was restored is known to be there if it is large
            store.fail_on("share", 2)  # the first one is a trial
        try:
            await (await opened.save(here.folder / "2", again, base=here.folder / "1"))
        except (StorageError, PeerError) as error:
            told["second"] = [type(error).__name__, str(error)]

    await here.meet("linked")
    return {**told, "there": here.names()}
