"""Finds the leaves that a base checkpoint holds unchanged, and where."""

from __future__ import annotations

__all__ = (
    "Candidates",
    "compare",
    "digest_name",
    "may_be_linked",
    "take_digests",
    "unchanged_on_host",
)

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from operator import attrgetter
from typing import final

from penstock.kernel.codecs import AUTO
from penstock.kernel.messages.save import Leaf, Leaves, References, SavePlan, Unchanged
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.protocols.layouts import StoredCheckpoint, chunk_file_of
from penstock.kernel.protocols.leaf import LeafSpec, keys_of, names_of
from penstock.kernel.protocols.written import DISK_MARK, Written
from penstock.stages.messages.batching import grouped
from penstock.stages.planning.leaf_sources import key_columns, spec_column
from penstock.stages.reuse.value_cache import KnownValues


@final
@dataclass(frozen=True, slots=True)
class Candidates:
    """The unchanged leaves, and the places of their bytes in the base."""

    leaves: Leaves
    parts: Sequence[Sequence[Written]]  #: of each leaf

    def only(self, numbers: Sequence[int]) -> Candidates:
        """Return those with some numbers."""
        return Candidates(self.leaves.part(numbers), [self.parts[number] for number in numbers])


def may_be_linked(run: SaveRun, leaves: Leaves, plan: SavePlan) -> bool:
    """Return whether a look at the base may find a leaf unchanged, or must refuse the base. Blocking.

    A program that computes a new state for each step saves no object twice, and needs no such look.
    """
    base = run.base
    if base is None:
        return run.request.by_digest
    if run.request.by_digest or not (run.request.base_if_whole or run.store.kind(base) is not None):
        return True

    noted = KnownValues(run.caches.known_values).noted(base)
    return _any_known(leaves, plan, _by_name(run, base, noted))


def unchanged_on_host(run: SaveRun, leaves: Leaves, plan: SavePlan) -> Unchanged | None:
    """Return the leaves that may be linked, if nothing is lost by staging them before that. Blocking.

    Nothing is where the save does without a base that is damaged, and where the leaves are on the host: then
    no byte of theirs is copied, but for small ones.

    Returns:
        None if the base is to be looked at before the leaves are staged.
    """
    base = run.base
    if base is None or not run.request.base_if_whole or run.request.by_digest or plan.changes:
        return None

    identity = run.store.identity(base)
    known = _known(run, base, identity)
    numbers = {where: list(_same_objects(leaves, plan, of_tree)) for where, of_tree in known.items()}
    chosen = [at for some in numbers.values() for at in some]
    alike = {(id(leaves.specs[at]), id(plan.handlers[leaves.indices[at]])): at for at in chosen}
    for leaf in map(leaves.__getitem__, alike.values()):
        if any(piece.cost for piece in leaf.handler.pieces(leaf, leaf.spec.nbytes)):
            return None

    return Unchanged(identity, numbers) if chosen else None


def compare(
    run: SaveRun, base: str, identity: object, leaves: Leaves, plan: SavePlan
) -> tuple[str, Candidates, dict[str, int]]:
    """Find the leaves that the base holds unchanged. Runs in a worker thread.

    Returns:
        The directory that the names of the base's data files are relative to, the leaves, and the sizes
        of their files.
    """
    planned, by_digest = plan.unchanged, run.request.by_digest
    nothing = Candidates(leaves.part([]), ())
    if planned is not None and planned.identity != identity:
        return base, nothing, {}

    known: Mapping[str, References] = {} if by_digest or planned else _known(run, base, identity)
    is_there = run.request.base_if_whole or run.store.kind(base) is not None  # otherwise opening it says so
    if not (by_digest or planned) and is_there and not _any_known(leaves, plan, known):
        return base, nothing, {}

    # On a local disk there may be one process's part of what several saved.
    if run.operation.is_alone and run.store.kind(os.path.join(base, DISK_MARK)) is not None:
        return base, nothing, {}

    checkpoint, key = _open(run, base)
    if by_digest:
        unchanged = _same_digest(run, leaves, plan, checkpoint)
    elif planned is not None:
        unchanged = list(planned.numbers.get(key, ()))
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
) -> Candidates:
    """Find the unchanged leaves whose stored bytes the new checkpoint can use as they are."""
    rows = {keys: row for row, keys in enumerate(key_columns(checkpoint.leaves)[0])}
    keys, before = keys_of(plan.infos), spec_column(checkpoint.leaves)
    specs, lies_right = _SpecsWithoutCodec(), _Places(run, leaves)
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

    alone = run.operation.is_alone  # then every part is its own, and not looked at one by one
    indices = [leaves.indices[at] for at, _ in there]
    chosen: list[int] = []
    parts: list[Sequence[Written]] = []
    for (at, _), stored in zip(there, checkpoint.parts([row for _, row in there], indices), strict=True):
        # Each process links what it would write itself.
        here = stored if alone else _written_here(leaves[at], stored)
        if here and lies_right.all_of(at, here):
            chosen.append(at)
            parts.append(here)

    found = leaves.part(chosen)
    return Candidates(replace(found, specs=list(map(specs.of, found.specs))), parts)


def _written_here(leaf: Leaf, parts: Sequence[Written]) -> list[Written]:
    """Return the parts of the chunks that this process writes of a leaf; none if any is not there."""
    here = {plan.chunk for plan in leaf.handler.pieces(leaf, leaf.spec.nbytes)}
    found = [part for part in parts if part.chunk in here]
    return found if {part.chunk for part in found} == here else []


def _alike(now: LeafSpec, then: LeafSpec) -> bool:
    """True if the stored bytes have the same meaning. All other metadata of a leaf is always written anew."""
    if not now.nbytes or now.codec not in (None, AUTO):
        return False  # its encoded bytes are not known yet

    return (now.shape, now.dtype, now.chunk_shape) == (then.shape, then.dtype, then.chunk_shape)


@final
class _SpecsWithoutCodec:
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

    __slots__ = ("_folder", "_folders", "_layout", "_leaves", "_together")

    def __init__(self, run: SaveRun, leaves: Leaves) -> None:
        self._layout = run.layout
        self._leaves = leaves
        self._folder = ""
        if run.layout.arrays is not None:
            self._folder = os.path.join(run.own_folder, os.path.dirname(run.layout.data_file()))

        self._folders: dict[str, str] = {}
        self._together: bool | None = None  #: whether all chunks may be in any data files

    def all_of(self, at: int, parts: Sequence[Written]) -> bool:
        """True if it would for all parts of the leaf with this number."""
        layout = self._layout
        if layout.arrays is None:
            return True
        if self._together is None:
            self._together = chunk_file_of(layout, self._leaves[at], parts[0].chunk) is None
        if not self._together:
            leaf = self._leaves[at]
            return all(part.file == chunk_file_of(layout, leaf, part.chunk) for part in parts)

        folder = self._folder
        if layout.folders is not None:
            folder = os.path.join(layout.folders.folder(self._leaves[at]), folder)

        # Once for each leaf that a save links: without a call for each of its parts.
        for part in parts:
            if part.file not in self._folders:
                self._folders[part.file] = os.path.dirname(part.file)
            if self._folders[part.file] != folder:
                return False

        return True


def _open(run: SaveRun, base: str) -> tuple[StoredCheckpoint, str]:
    """Open the base. Returns it with its key in the mapping that `_known` returns."""
    if run.layout.folders is not None:
        return run.layout.folders.open_all(run.store, base), ""

    checkpoint = run.finder.find(run.store, base).open()
    return checkpoint, checkpoint.directory


def _known(run: SaveRun, base: str, identity: object) -> Mapping[str, References]:
    """Return the known values in the base; its identity is that before anything of it was read."""
    return _by_name(run, base, KnownValues(run.caches.known_values).find(base, identity))


def _by_name(run: SaveRun, base: str, known: Mapping[str, References]) -> Mapping[str, References]:
    """Return the known values of each tree, by directory, and by stored name in this save.

    If this save writes items, the trees of all items are merged under one empty key.
    """
    if run.layout.folders is None:
        return known

    return {
        "": run.layout.folders.from_folders({os.path.relpath(where, base): of for where, of in known.items()})
    }


def _any_known(leaves: Leaves, plan: SavePlan, known: Mapping[str, References]) -> bool:
    """True if any leaf is a known object. If none is, the base need not be opened."""
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


def _same_digest(run: SaveRun, leaves: Leaves, plan: SavePlan, checkpoint: StoredCheckpoint) -> list[int]:
    """Return the numbers of the leaves that the base has with the same digest."""
    recorded, names = checkpoint.digests, names_of(plan.infos)
    digests = [plan.digests.get(names[index]) for index in leaves.indices]
    return [
        at
        for at, (index, digest) in enumerate(zip(leaves.indices, digests, strict=True))
        if digest is not None and digest == recorded.get(digest_name(run, names[index]))
    ]


def digest_name(run: SaveRun, name: str) -> str:
    """Return the name under which the digest of a leaf is recorded.

    Several processes that save together record one each of what they write of a leaf. It means nothing to
    another number of processes.
    """
    if run.operation.is_alone:  # the name on disk is the leaf's
        return name

    index, count = run.process
    return f"{name}\0{index}/{count}"  # no stored name contains a NUL


async def take_digests(run: SaveRun, leaves: Sequence[Leaf]) -> Mapping[str, bytes]:
    """Return the SHA-256 of every leaf that has bytes, by stored name. Reads every byte.

    If several processes save together, it is that of what this one writes of a leaf.

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
