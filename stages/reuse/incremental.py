"""Finds the leaves that the base checkpoint holds already, and links their files instead of writing them.

Checkpoints that share files do not depend on each other. The files are hard links, so either checkpoint
may be deleted.
"""

from __future__ import annotations

__all__ = ("files_worth_linking", "set_aside", "take_digests")

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.leaf_infos import keys_of, names_of
from penstock.kernel.protocols.store_capabilities import SharedFiles, SyncsFiles
from penstock.kernel.protocols.written import Written
from penstock.kernel.storage.holds import hold_for_reading
from penstock.kernel.storage.workspace import Workspace
from penstock.stages.common.batching import grouped
from penstock.stages.common.codec_rules import AUTO
from penstock.stages.planning.stored_columns import key_columns, spec_column
from penstock.stages.reuse.value_cache import KnownValues

LIVE_SHARE = 0.5
"""A file is linked if at least this share of its bytes is still needed. Otherwise the leaves in it are
written again. So a chain of checkpoints never takes more than twice the bytes of its leaves."""


@final
@dataclass(frozen=True, slots=True)
class _Candidates:
    """The unchanged leaves, and the places of their bytes in the base."""

    leaves: Leaves
    parts: Sequence[Sequence[Written]]  #: of each leaf


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
    assert isinstance(run.workspace, Workspace), "several processes that save together link nothing"
    await run.workspace.restart()
    return leaves, plan


async def _set_aside(
    run: SaveRun, base: str, identity: object, leaves: Leaves, plan: SavePlan
) -> tuple[Leaves, SavePlan]:
    directory, found, sizes = await run.threads.run(_compare, run, base, identity, leaves, plan)
    if not found.parts:
        return leaves, plan

    files = files_worth_linking(found.parts, sizes)
    for folder in sorted({os.path.dirname(file) for file in files}):
        await run.workspace.open(folder)

    shared = await run.threads.run(_share, run, directory, files)
    return await run.threads.run(_divided, run, found, shared, leaves, plan)


def _divided(
    run: SaveRun, found: _Candidates, shared: set[str], leaves: Leaves, plan: SavePlan
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


def _compare(
    run: SaveRun, base: str, identity: object, leaves: Leaves, plan: SavePlan
) -> tuple[str, _Candidates, dict[str, int]]:
    """Find the leaves that the base holds unchanged. Runs in a worker thread.

    Returns:
        The directory that the names of the base's data files are relative to, the leaves, and the sizes
        of their files.
    """
    known: Mapping[str, References] = {} if run.by_digest else _known(run, base, identity)
    nothing = _Candidates(leaves.part([]), ())
    if not run.by_digest and run.store.kind(base) is not None and not _any_known(leaves, plan, known):
        return base, nothing, {}

    checkpoint, key = _open(run, base)
    if run.by_digest:
        unchanged = _same_digest(leaves, plan, checkpoint)
    else:
        unchanged = list(_same_objects(leaves, plan, known.get(key, {})))

    # Leaves that a later stage changes are always written: here they still have their old values.
    unchanged = [at for at in unchanged if leaves.indices[at] not in plan.changes]
    if not unchanged:
        return checkpoint.directory, nothing, {}

    found = _stored(run, leaves, unchanged, plan, checkpoint)
    files = {part.file for parts in found.parts for part in parts}
    sizes = {file: run.store.size(os.path.join(checkpoint.directory, file)) for file in files}
    return checkpoint.directory, found, sizes


def _stored(
    run: SaveRun, leaves: Leaves, unchanged: Sequence[int], plan: SavePlan, checkpoint: StoredCheckpoint
) -> _Candidates:
    """Find the unchanged leaves whose stored bytes the new checkpoint can use as they are."""
    rows = {keys: row for row, keys in enumerate(key_columns(checkpoint.leaves)[0])}
    keys, before = keys_of(plan.infos), spec_column(checkpoint.leaves)
    specs, lies_right = _Uncoded(), _Places(run, leaves)
    alike: dict[tuple[int, int], bool] = {}  # by the identity of both specs, which many leaves share
    there: list[tuple[int, int]] = []  # the numbers of leaves, and their rows in the base
    for at in unchanged:
        row = rows.get(keys[leaves.indices[at]])
        if row is None:
            continue

        now = leaves.specs[at]
        both = id(now), id(before[row])
        if both not in alike:
            alike[both] = _alike(now, before[row])
        if alike[both]:
            there.append((at, row))

    indices = [leaves.indices[at] for at, _ in there]
    chosen: list[int] = []
    parts: list[Sequence[Written]] = []
    for (at, _), of_leaf in zip(there, checkpoint.parts([row for _, row in there], indices), strict=True):
        if of_leaf and lies_right.all_of(at, of_leaf):
            chosen.append(at)
            parts.append(of_leaf)

    found = leaves.part(chosen)
    return _Candidates(replace(found, specs=list(map(specs.of, found.specs))), parts)


def _alike(now: LeafSpec, then: LeafSpec) -> bool:
    """Whether the stored bytes have the same meaning. All other metadata of a leaf is always written anew."""
    if not now.nbytes or now.codec not in (None, AUTO):
        return False  # its encoded bytes are not known yet

    return (now.shape, now.dtype, now.chunk_shape) == (then.shape, then.dtype, then.chunk_shape)


@final
class _Uncoded:
    """Specs with no codec instead of an undecided one: the stored bytes have none."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, LeafSpec] = {}

    def of(self, spec: LeafSpec) -> LeafSpec:
        """Return the spec without a codec: one object for all leaves that share one."""
        if spec.codec is None:
            return spec
        if id(spec) not in self._known:
            self._known[id(spec)] = replace(spec, codec=None)

        return self._known[id(spec)]


@final
class _Places:
    """Says whether the new checkpoint would look for parts in files of the same names as the base."""

    __slots__ = ("_folder", "_folders", "_items", "_layout", "_leaves", "_together")

    def __init__(self, run: SaveRun, leaves: Leaves) -> None:
        self._layout = run.layout if isinstance(run.layout, FormattedLayout) else None
        self._items = run.layout if isinstance(run.layout, ItemsLayout) else None
        self._leaves = leaves
        self._folder = "" if self._layout is None else os.path.dirname(self._layout.data_file())
        self._folders: dict[str, str] = {}
        self._together: bool | None = None  #: whether all chunks may lie in any data files

    def all_of(self, at: int, parts: Sequence[Written]) -> bool:
        """Whether it would for all parts of the leaf with this number."""
        layout = self._layout
        if layout is None:
            return True
        if self._together is None:
            self._together = layout.chunk_file(self._leaves[at], parts[0].chunk) is None
        if not self._together:
            leaf = self._leaves[at]
            return all(part.file == layout.chunk_file(leaf, part.chunk) for part in parts)

        folder = self._folder
        if self._items is not None:
            folder = os.path.join(self._items.folder(self._leaves[at]), folder)

        return all(self._folder_of(part.file) == folder for part in parts)

    def _folder_of(self, file: str) -> str:
        folder = self._folders.get(file)
        if folder is None:
            folder = self._folders[file] = os.path.dirname(file)

        return folder


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


def _any_known(leaves: Leaves, plan: SavePlan, known: Mapping[str, References]) -> bool:
    """Whether any leaf is a known object. If none is, the base need not be opened."""
    return any(True for references in known.values() for _ in _same_objects(leaves, plan, references))


def _same_objects(leaves: Leaves, plan: SavePlan, known: References) -> Iterator[int]:
    """Yield the numbers of the leaves that are known objects."""
    if not known:
        return

    names = names_of(plan.infos)
    for at, (index, value) in enumerate(zip(leaves.indices, leaves.values or (), strict=True)):
        reference = known.get(names[index])
        if reference is not None and reference() is value:
            yield at


def _same_digest(leaves: Leaves, plan: SavePlan, checkpoint: StoredCheckpoint) -> list[int]:
    """Return the numbers of the leaves that the base has with the same digest."""
    recorded, names = checkpoint.digests, names_of(plan.infos)
    digests = [plan.digests.get(names[index]) for index in leaves.indices]
    return [
        at
        for at, (index, digest) in enumerate(zip(leaves.indices, digests, strict=True))
        if digest is not None and digest == recorded.get(names[index])
    ]


async def take_digests(run: SaveRun, leaves: Sequence[Leaf]) -> Mapping[str, bytes]:
    """Return the SHA-256 of every leaf that has bytes, by stored name. Reads every byte.

    The bytes that must be copied to the host are leased, up to one piece at a time.
    """
    found: dict[str, bytes] = {}
    most = run.limits.piece_bytes
    for group in await run.threads.run(_groups, leaves, most):
        nbytes = min(most, sum([leaf.spec.nbytes for leaf in group]))
        lease = await run.lease(nbytes, group[0].info.key_path, prioritised=False)
        try:
            found.update(await run.threads.run(_digests, group, most))
        finally:
            lease.release()

    return found


def _groups(leaves: Sequence[Leaf], most: int) -> list[tuple[Leaf, ...]]:
    return list(grouped([leaf for leaf in leaves if leaf.spec.nbytes], most))


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
