"""Links to a base in a save by several processes: each links its own unchanged parts.

Nothing need be agreed. A chunk that a process links has the bytes that it would write, whatever the others do
with the rest of the leaf. Each process looks for its own chunks in its own folder, so no two link one file.

Links are made once the primary has made the place, after staging. Then it is too late to write a leaf after
all, so what can be known of linking is tried before. On local disks, and in keepers, each process has a place
of its own, and makes them at once.
"""

from __future__ import annotations

__all__ = ("find_links", "make_links")

import errno
import os
import secrets
from contextlib import suppress
from dataclasses import replace

from penstock.kernel.errors import StorageError
from penstock.kernel.messages.joint_plan import BaseLinks
from penstock.kernel.messages.save import Leaves, SavePlan
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.stores import hold_for_reading
from penstock.stages.reuse.base_comparison import Candidates
from penstock.stages.reuse.incremental import (
    divided_by,
    link_files,
    linkable,
    set_aside,
    unless_replaced,
)


async def find_links(run: SaveRun, leaves: Leaves, plan: SavePlan) -> tuple[Leaves, SavePlan]:
    """Return the leaves that this process must write, and the plan with those that the base holds in `kept`.

    Args:
        run: Of the save, with a base.
        leaves: Of which this process writes a part.
        plan: With a `JointPlan`.

    Raises:
        CorruptCheckpointError: If the base is missing or damaged, unless the save does without it then.
    """

    async def look(base: str, identity: object) -> tuple[Leaves, SavePlan]:
        directory, found, files = await linkable(run, base, identity, leaves, plan)
        return await run.threads.run(_divided, run, identity, leaves, plan, directory, found, files)

    if run.operation.is_local:
        return await set_aside(run, leaves, plan)

    return await unless_replaced(run, look) or (leaves, plan)


def _divided(
    run: SaveRun,
    identity: object,
    leaves: Leaves,
    plan: SavePlan,
    directory: str,
    found: Candidates,
    files: set[str],
) -> tuple[Leaves, SavePlan]:
    if not files or not _can_link(run, os.path.join(directory, min(files))):
        return leaves, plan

    rest, plan = divided_by(run, found, files, leaves, plan)
    if plan.kept is None or plan.joint is None:
        return leaves, plan

    linked = sorted(plan.kept.written.files)
    links = BaseLinks(directory=directory, files=linked, identity=identity)
    return rest, replace(plan, joint=replace(plan.joint, links=links))


def _can_link(run: SaveRun, file: str) -> bool:
    """Try to link a file of the base into a temporary directory next to the new checkpoint."""
    store = run.store
    parent = os.path.dirname(run.path)
    while store.kind(parent) is None and parent != os.path.dirname(parent):
        parent = os.path.dirname(parent)

    name = os.path.basename(run.layout.temporary_name(run.path))
    trial = os.path.join(parent, f"{name}-{secrets.token_hex(8)}")
    try:
        store.make_directory(trial)
        store.share(file, os.path.join(trial, "link"))
    except StorageError as error:
        run.events.warning("save.not_linked", path=run.path, file=file, error=repr(error))
        return False
    finally:
        with suppress(StorageError):
            store.remove_tree(trial)

    return True


async def make_links(run: SaveRun, links: BaseLinks) -> None:
    """Link the files, durably, into the place where the checkpoint is built.

    Raises:
        StorageError: If one cannot be linked, or the base was replaced meanwhile.
    """
    assert run.base is not None
    async with hold_for_reading(run.store, run.threads, run.base):
        shared = await link_files(run, links.directory, links.files)
        if await run.threads.run(run.store.identity, run.base) != links.identity:
            raise StorageError("link", run.base, "the base was replaced while it was saved; save once more")

    absent = sorted(set(links.files) - shared)
    if absent:
        problem = "it could be linked before, and cannot any more; save once more"
        raise StorageError("link", os.path.join(links.directory, absent[0]), problem, errno.ESTALE)
