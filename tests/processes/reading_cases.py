"""Reading what was saved together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.processes.job_case import Here, checkpointer
from tests.processes.trees import LARGE, differences, distinct_bytes, large_values, mesh_of, spread


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


def _saved(here: Here) -> Path:
    """Return what another job left for this one, or an earlier case of this one."""
    given = here.folder.parent / "saved"
    return given if given.exists() else here.folder.parent / "saves_large_arrays" / "step_1"


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))
