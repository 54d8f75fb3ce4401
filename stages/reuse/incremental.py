"""Finds the leaves that the base checkpoint holds already, and links their files instead of writing them.

Checkpoints that share files do not depend on each other. The files are hard links, so either checkpoint
may be deleted.
"""

from __future__ import annotations

__all__ = ("divided_by", "files_worth_linking", "link_files", "linkable", "set_aside", "unless_replaced")

import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from penstock.kernel.errors import PenstockError, StorageError
from penstock.kernel.messages.leaves import Leaves
from penstock.kernel.messages.save import SavePlan, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.store_capabilities import SharedFiles, SyncsFiles
from penstock.kernel.protocols.written import Written
from penstock.kernel.storage.reading import Reading, reading
from penstock.kernel.storage.workspace import Workspace
from penstock.stages.reuse.base_comparison import Candidates, compare
from penstock.stages.reuse.linked_bytes import intact_only

T = TypeVar("T")

LIVE_SHARE = 0.5
"""A file is linked if at least this share of its bytes is still needed. Otherwise the leaves in it are
written again. So a chain of checkpoints never takes more than twice the bytes of its leaves."""


async def set_aside(run: SaveRun, leaves: Leaves, plan: SavePlan) -> tuple[Leaves, SavePlan]:
    """Return the leaves that must be written, in order, and the plan with all others in `kept`.

    The files of the leaves that are kept are linked into the new checkpoint. If another save overwrites the
    base meanwhile, none are kept: what was linked may be of either checkpoint.

    Raises:
        CorruptCheckpointError: If the base is missing or damaged.
    """

    async def look(base: str, identity: object) -> tuple[Leaves, SavePlan]:
        return await _set_aside(run, base, identity, leaves, plan)

    found = await unless_replaced(run, look)
    if found is not None:
        return found

    assert isinstance(run.workspace, Workspace), "several processes that save together link elsewhere"
    await run.workspace.restart()
    return leaves, plan


async def unless_replaced(run: SaveRun, look: Callable[[str, object], Awaitable[T]]) -> T | None:
    """Return what `look` finds in the base, given its path and identity; None if it is replaced meanwhile.

    The base is held for reading. What `look` raises counts only if the base stayed the same.
    """
    base = run.base
    assert base is not None
    source: Reading | None = None
    try:
        async with reading(run.store, run.threads, base) as source:
            return await look(base, source.identity)
    except PenstockError:
        if source is None or source.replaced is None:
            raise

    run.events.warning("save.base_replaced", path=run.path, base=base)
    return None


async def _set_aside(
    run: SaveRun, base: str, identity: object, leaves: Leaves, plan: SavePlan
) -> tuple[Leaves, SavePlan]:
    directory, found, files = await linkable(run, base, identity, leaves, plan)
    if not files:
        return leaves, plan

    shared = await link_files(run, directory, files)
    return await run.threads.run(divided_by, run, found, shared, leaves, plan)


async def linkable(
    run: SaveRun, base: str, identity: object, leaves: Leaves, plan: SavePlan
) -> tuple[str, Candidates, set[str]]:
    """Find the unchanged leaves whose stored bytes are intact, as far as they are compared in this save.

    Returns:
        The directory that the names of files are relative to, the leaves, and the files worth linking.
    """
    directory, found, sizes = await run.threads.run(compare, run, base, identity, leaves, plan)
    files = files_worth_linking(found.parts, sizes)
    if not files or not isinstance(run.store, SharedFiles):
        return directory, found, set()

    found = found.only(
        [at for at, parts in enumerate(found.parts) if files.issuperset([p.file for p in parts])]
    )
    intact = await intact_only(run, directory, found)
    return directory, intact, files if intact is found else files_worth_linking(intact.parts, sizes)


def divided_by(
    run: SaveRun, found: Candidates, shared: set[str], leaves: Leaves, plan: SavePlan
) -> tuple[Leaves, SavePlan]:
    """Set aside the leaves all of whose files are shared."""
    chosen = [at for at, parts in enumerate(found.parts) if shared.issuperset([part.file for part in parts])]
    if not chosen:
        return leaves, plan

    kept = found.leaves.part(chosen).without_values()
    batch = WrittenBatch(kept, tuple([part for at in chosen for part in found.parts[at]]))
    gone = set(kept.indices)
    run.events.info("save.unchanged", path=run.path, n_leaves=len(kept), nbytes=batch.nbytes)
    rest = leaves.part([number for number, index in enumerate(leaves.indices) if index not in gone])
    return rest, replace(plan, kept=batch)


def files_worth_linking(unchanged: Iterable[Sequence[Written]], sizes: Mapping[str, int]) -> set[str]:
    """Choose the data files of the base that the new checkpoint shares.

    Args:
        unchanged: The parts of each unchanged leaf.
        sizes: Bytes of each file.

    Returns:
        The files with at least `LIVE_SHARE` of their bytes needed. A leaf can be kept only if all of its
        files are shared, so the parts of other leaves do not count as needed.
    """
    leaves = [parts for parts in unchanged if parts]
    files = {part.file for parts in leaves for part in parts}
    while True:
        needed: dict[str, int] = defaultdict(int)
        for parts in leaves:
            if all(part.file in files for part in parts):
                for part in parts:
                    needed[part.file] += part.nbytes

        enough = {file for file in files if needed[file] and needed[file] >= LIVE_SHARE * sizes[file]}
        if enough == files:
            return files

        files = enough


async def link_files(run: SaveRun, directory: str, files: Iterable[str]) -> set[str]:
    """Link each file below `directory` into the new checkpoint, durably. Returns those that could be linked.

    Whoever wrote a file may not have synced it: think of `cp -r`.
    """
    names = sorted(files)
    for folder in sorted(set(map(os.path.dirname, names))):
        await run.workspace.open(folder)

    return await run.threads.run(_link, run, directory, names)


def _link(run: SaveRun, directory: str, files: Sequence[str]) -> set[str]:
    shared: set[str] = set()
    if not isinstance(run.store, SharedFiles):
        return shared

    for file in files:
        path = run.workspace.path(file)
        try:
            run.store.share(os.path.join(directory, file), path)
        except StorageError as error:
            run.events.warning("save.not_linked", path=run.path, file=file, error=repr(error))
            continue

        if isinstance(run.store, SyncsFiles):
            run.store.sync_file(path)

        shared.add(file)

    return shared
