"""Reading what was saved together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.corpus.corpora import unpack
from tests.processes.job_case import Here, checkpointer
from tests.processes.trees import LARGE, P, differences, distinct_bytes, large_values, mesh_of, spread


async def saves_large_arrays(here: Here) -> Any:
    """Save what other jobs restore."""
    tree = spread(large_values(), LARGE, mesh_of(here.count))
    async with checkpointer() as opened:
        await (await opened.save(here.folder / "step_1", tree))


async def reads_what_its_devices_hold(here: Here) -> Any:
    """Restore what a job of any size saved as `saved`, and count the bytes."""
    tree = spread(large_values(), LARGE, mesh_of(here.count))
    read: dict[str, int] = {}
    unverified: dict[str, int] = {}
    async with checkpointer() as opened:
        for verify, counted in ((None, read), (False, unverified)):
            for name in tree:
                before = bytes_read()
                found = await opened.restore(
                    _saved(here), like={name: tree[name]}, only=[name], verify=verify
                )
                counted[name] = bytes_read() - before
                assert differences(found[name], tree[name]) == []

        document_bytes = bytes_read()
        await opened.metadata(_saved(here))
        document_bytes = bytes_read() - document_bytes

    need = {name: distinct_bytes(tree[name]) for name in tree}
    return {"read": read, "unverified": unverified, "need": need, "documents": document_bytes}


def _is_part_of(found: Any, array: Any) -> bool:
    """Whether what this process holds of an array, as a restore without a target gives it, is right."""
    if not isinstance(found, jax.Array):
        return bool(np.asarray(found).tobytes() == array.tobytes())

    return all(
        np.asarray(shard.data).tobytes() == np.ascontiguousarray(array[shard.index]).tobytes()
        for shard in found.addressable_shards
    )


def _saved(here: Here) -> Path:
    """Return what another job left for this one, or an earlier case of this one."""
    given = here.folder.parent / "saved"
    return given if given.exists() else here.folder.parent / "saves_large_arrays" / "step_1"


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


async def what_orbax_saved_from_two_is_read(here: Here) -> Any:
    """Restore all that two processes of Orbax wrote, onto a mesh over all of these."""
    corpus = here.folder / f"corpus {here.rank}"
    unpack(corpus)
    saved = corpus / "corpus_mp"
    npz = dict(np.load(saved / "expected.npz"))
    npz["bf"] = npz.pop("bf_u16").view(jnp.bfloat16)
    mesh, found = mesh_of(here.count), dict[str, list[str]]()
    arrays = {name: array for name, array in npz.items() if "." not in name and array.ndim}
    like = {
        name: spread(array, P("host") if array.shape[0] % here.count == 0 else P(), mesh)
        for name, array in arrays.items()
    }
    async with checkpointer() as opened:
        for name in ("pytree_ocdbt_zarr3", "manager/1/state", "manager/2", "manager"):
            tree = await opened.restore(saved / name, like=like, only=[*like])
            found[name] = differences(tree, like)
            whole = await opened.restore(saved / name)
            found[f"{name}, whole"] = [
                key for key, array in arrays.items() if not _is_part_of(whole[key], array)
            ]

    return {"differs": found, "names": len(like)}
