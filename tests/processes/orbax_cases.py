"""Orbax beside us, and its names in penstock."""

from __future__ import annotations

from typing import Any

import anyio
from tests.processes.job_case import Here
from tests.processes.trees import SPECS, differences, mesh_of, spread, values, whole

from penstock.errors import InvalidLeafError


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


async def orbaxs_names_refuse_what_is_spread(here: Here) -> Any:
    """They have no way yet to save it together, so no process may wait for another."""

    def save() -> str:
        import penstock.orbax as ocp

        try:
            # Each at a path of its own: of two that build in one place, the second is refused for that.
            ocp.PyTreeCheckpointer().save(here.folder / f"step_{here.rank}", whole(mesh_of(here.count)))
        except InvalidLeafError as error:
            return str(error.key_path)

        return "saved"

    return await anyio.to_thread.run_sync(save)
