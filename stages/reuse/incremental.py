"""Finds the leaves that the base checkpoint holds already, and links their files instead of writing them.

Checkpoints that share files do not depend on each other. The files are hard links, so either checkpoint
may be deleted.
"""

from __future__ import annotations

__all__ = ("files_worth_linking", "set_aside", "take_digests")

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from operator import attrgetter
from typing import final

from penstock.kernel.errors import PenstockError, StorageError
from penstock.kernel.messages.leaves import Leaf, Leaves
from penstock.kernel.messages.save import References, SavePlan, WrittenBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.checkpoints import StoredCheckpoint
from penstock.kernel.protocols.layouts import FormattedLayout, ItemsLayout
from penstock.kernel.protocols.leaf import StoredLeaf
from penstock.kernel.protocols.store_capabilities import SharedFiles, SyncsFiles
from penstock.kernel.protocols.written import Written
from penstock.kernel.storage.holds import hold_for_reading
from penstock.stages.common.batching import grouped
from penstock.stages.common.codec_rules import AUTO
from penstock.stages.reuse.value_cache import KnownValues

LIVE_SHARE = 0.5
"""A file is linked if at least this share of its bytes is still needed. Otherwise the leaves in it are
written again. So a chain of checkpoints never takes more than twice the bytes of its leaves."""


@final
@dataclass(frozen=True, slots=True)
class _Candidate:
    """An unchanged leaf, and the places of its bytes in the base."""

    leaf: Leaf
    parts: tuple[Written, ...]


async def set_aside(run: SaveRun, leaves: Leaves, plan: SavePlan) -> tuple[Leaves, SavePlan]:
    """Return the leaves that must be written, in order, and the plan with all others in `kept`.

    The files of the leaves that are kept are linked into the new checkpoint. If another save overwrites the
    base meanwhile, none are kept: what was linked may be of either checkpoint.

    Raises:
        CorruptCheckpointError: If the base is missing or damaged.
    """
    assert run.base is not None
    identify = partial(run.threads.run, run.store.identity, run.base)
    async with hold_for_reading(run.store, run.threads, run.base):
        before = await identify()
        try:
            found = await _set_aside(run, run.base, before, leaves, plan)
        except PenstockError:
            if before == await identify():
                raise
        else:
            if before == await identify():
                return found

    run.events.warning("save.base_replaced", path=run.path, base=run.base)
    await run.workspace.restart()
    return leaves, plan


async def _set_aside(
    run: SaveRun, base: str, identity: object, leaves: Leaves, plan: SavePlan
) -> tuple[Leaves, SavePlan]:
    directory, candidates, sizes = await run.threads.run(_compare, run, base, identity, leaves, plan)
    if not candidates:
        return leaves, plan

    files = files_worth_linking([candidate.parts for candidate in candidates], sizes)
    for folder in sorted({os.path.dirname(file) for file in files}):
        await run.workspace.open(folder)

    shared = await run.threads.run(_share, run, directory, files)
    kept = [found for found in candidates if all(part.file in shared for part in found.parts)]
    if not kept:
        return leaves, plan

    staged = tuple(found.leaf.without_value() for found in kept)
    batch = WrittenBatch(staged, tuple(part for found in kept for part in found.parts))
    gone = {found.leaf.index for found in kept}
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


def _compare(
    run: SaveRun, base: str, identity: object, leaves: Sequence[Leaf], plan: SavePlan
) -> tuple[str, list[_Candidate], dict[str, int]]:
    """Find the leaves that the base holds unchanged. Runs in a worker thread.

    Returns:
        The directory that the names of the base's data files are relative to, the leaves, and the sizes
        of their files.
    """
    known: Mapping[str, References] = {} if run.by_digest else _known(run, base, identity)
    if not run.by_digest and run.store.kind(base) is not None and not _any_known(leaves, known):
        return base, [], {}

    checkpoint, key = _open(run, base)
    same = _same_digest(plan.digests, checkpoint) if run.by_digest else _same_object(known.get(key, {}))

    # Leaves that a later stage changes are always written: here they still have their old values.
    unchanged = [leaf for leaf in leaves if leaf.index not in plan.changes and same(leaf)]
    stored = {leaf.info.keys: leaf for leaf in checkpoint.leaves} if unchanged else {}
    found: list[_Candidate] = []
    for leaf in unchanged:
        before = stored.get(leaf.info.keys)
        if before is not None and _alike(leaf, before):
            parts = checkpoint.parts(before)
            if parts and _lie_right(run, leaf, parts):
                there = tuple([replace(part, leaf=leaf.index) for part in parts])
                found.append(_Candidate(_uncoded(leaf), there))

    files = {part.file for candidate in found for part in candidate.parts}
    sizes = {file: run.store.size(os.path.join(checkpoint.directory, file)) for file in files}
    return checkpoint.directory, found, sizes


def _alike(leaf: Leaf, before: StoredLeaf) -> bool:
    """Whether the stored bytes have the same meaning. All other metadata of a leaf is always written anew."""
    if not leaf.spec.nbytes or leaf.spec.codec not in (None, AUTO):
        return False  # its encoded bytes are not known yet

    now, then = leaf.spec, before.spec
    return (now.shape, now.dtype, now.chunk_shape) == (then.shape, then.dtype, then.chunk_shape)


def _uncoded(leaf: Leaf) -> Leaf:
    """Return the leaf with no codec instead of an undecided one: its stored bytes have none."""
    return leaf if leaf.spec.codec is None else replace(leaf, spec=replace(leaf.spec, codec=None))


def _lie_right(run: SaveRun, leaf: Leaf, parts: Sequence[Written]) -> bool:
    """Whether the new checkpoint would look for the parts in files of the same names as the base."""
    layout = run.layout
    if not isinstance(layout, FormattedLayout):
        return True

    folder = os.path.dirname(layout.data_file())
    if isinstance(layout, ItemsLayout):
        folder = os.path.join(layout.folder(leaf), folder)

    for part in parts:
        name = layout.chunk_file(leaf, part.chunk)
        if part.file != name if name is not None else os.path.dirname(part.file) != folder:
            return False

    return True


def _open(run: SaveRun, base: str) -> tuple[StoredCheckpoint, str]:
    """Open the base. Returns it with its key in the mapping that `_known` returns."""
    if isinstance(run.layout, ItemsLayout):
        return run.layout.open_all(run.store, base), ""

    checkpoint = run.layout.open(run.store, base)
    return checkpoint, checkpoint.directory


def _known(run: SaveRun, base: str, identity: object) -> Mapping[str, References]:
    """Return the known values of each tree in the base, by directory, and by stored name in this save.

    The identity is that of the base before anything of it was read.
    If this save writes items, the trees of all items are merged under one empty key.
    """
    known = run.shared.of(KnownValues).find(base, identity)
    if not isinstance(run.layout, ItemsLayout):
        return known

    return {"": run.layout.from_folders({os.path.relpath(where, base): of for where, of in known.items()})}


def _any_known(leaves: Sequence[Leaf], known: Mapping[str, References]) -> bool:
    """Whether any leaf is a known object. If none is, the base need not be opened."""
    return any(same(leaf) for same in map(_same_object, known.values()) for leaf in leaves)


def _same_object(known: References) -> Callable[[Leaf], bool]:
    def same(leaf: Leaf) -> bool:
        reference = known.get(leaf.info.name)
        return reference is not None and reference() is leaf.value

    return same


def _same_digest(digests: Mapping[str, bytes], checkpoint: StoredCheckpoint) -> Callable[[Leaf], bool]:
    recorded = checkpoint.digests

    def same(leaf: Leaf) -> bool:
        digest = digests.get(leaf.info.name)
        return digest is not None and digest == recorded.get(leaf.info.name)

    return same


async def take_digests(run: SaveRun, leaves: Sequence[Leaf]) -> Mapping[str, bytes]:
    """Return the SHA-256 of every leaf that has bytes, by stored name. Reads every byte.

    The bytes that must be copied to the host are leased, up to one piece at a time.
    """
    found: dict[str, bytes] = {}
    most = run.limits.piece_bytes
    for group in grouped([leaf for leaf in leaves if leaf.spec.nbytes], most):
        nbytes = min(most, sum([leaf.spec.nbytes for leaf in group]))
        lease = await run.lease(nbytes, group[0].info.key_path, prioritised=False)
        try:
            found.update(await run.threads.run(_digests, group, most))
        finally:
            lease.release()

    return found


def _digests(leaves: Sequence[Leaf], piece_bytes: int) -> dict[str, bytes]:
    """Hash the chunks of each leaf. The digest does not depend on the size or the order of the pieces."""
    found: dict[str, bytes] = {}
    for leaf in leaves:
        digest = sha256()
        plans = leaf.handler.pieces(leaf, piece_bytes)
        for plan in sorted(plans, key=attrgetter("chunk", "start")):
            if plan.start == 0:
                digest.update(repr(plan.chunk).encode())

            digest.update(plan.take())

        found[leaf.info.name] = digest.digest()

    return found


def _share(run: SaveRun, directory: str, files: set[str]) -> set[str]:
    """Link each file into the new checkpoint, durably. Returns the files that could be linked.

    Whoever wrote a file may not have synced it: think of `cp -r`.
    """
    shared: set[str] = set()
    if not isinstance(run.store, SharedFiles):
        return shared

    for file in sorted(files):
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
