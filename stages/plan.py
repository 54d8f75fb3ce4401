"""Decides what to read, from what is on disk and what the caller wants."""

from __future__ import annotations

__all__ = ("Plan", "match")

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, cast, final, overload

from jax import tree_util

from penstock.kernel.errors import StructureMismatchError, TreeDifference
from penstock.kernel.messages.packs import ReadPack
from penstock.kernel.messages.restore import Located, ReadLeaf, RestorePlan
from penstock.kernel.messages.save import LeafBatch
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.pipeline.stage import Actor
from penstock.kernel.protocols.checkpoints import LeafColumns, StoredCheckpoint
from penstock.kernel.protocols.leaf import KeyKind, KeyPath, LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.leaf_handlers import LeafHandler
from penstock.kernel.protocols.reads import Target
from penstock.stages.common.batching import batched
from penstock.stages.planning.changed_leaves import plan_onto
from penstock.stages.planning.coalescing import join_reads
from penstock.stages.planning.mmap import map_leaves
from penstock.stages.planning.pack_selection import Wanted, make_packs
from penstock.stages.planning.splitting import in_parts
from penstock.stages.pytree.flattening import FlatLeaf, nest_columns
from penstock.stages.pytree.structure_cache import StructureCache

MOST_SUGGESTIONS = 40  # a search for the nearest name compares with every other,
MOST_CANDIDATES = 2_000  # so both are bounded: a wholly different tree has thousands


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Takes the `Located`, yields `LeafBatch[ReadLeaf]`es: small leaves in packs, then the others in order.

    Raises:
        StructureMismatchError: If the target and the checkpoint differ; it lists every difference.
        NoHandlerError: If nobody handles a type, wanted or stored.
    """

    @property
    def concurrency(self) -> int:
        """One: there is one tree."""
        return 1

    @asynccontextmanager
    async def open(self, run: RestoreRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one restore."""

        async def plan(located: Located, /) -> AsyncIterator[LeafBatch[ReadLeaf]]:
            whole, packs, leaves = await run.threads.run(_plan, run, located)
            if located.mmap:
                leaves = await run.threads.run(map_leaves, run, leaves)

            n_leaves = sum([leaf.ends_leaf for leaf in leaves]) + sum([len(pack) for pack in packs])
            run.progress.plan(
                n_leaves, sum([leaf.nbytes for leaf in leaves]) + sum([pack.nbytes for pack in packs])
            )
            if not n_leaves:  # of a result that takes nothing from the checkpoint
                yield LeafBatch((), plan=whole)

            for pack in packs:
                yield LeafBatch(pack, plan=whole)

            for batch in batched(leaves, run.limits, plan=whole):
                yield batch
                del batch  # the leaves belong to whoever comes next

        yield plan


@dataclass(frozen=True, slots=True)
class Match:
    """A stored leaf, and what the target has in its place."""

    stored: StoredLeaf
    like: Any
    has_like: bool


def _plan(run: RestoreRun, located: Located) -> tuple[RestorePlan, list[ReadPack], list[ReadLeaf]]:
    checkpoint = located.checkpoint
    if located.options is not None:
        plan, leaves = plan_onto(run, located, located.options, match)
        return plan, [], in_parts(run, checkpoint, leaves)

    differences: list[TreeDifference] = []
    if located.has_like:
        plan, rows, likes, differences = _match_like(run, located)
    else:
        stored = checkpoint.leaves
        keys, kinds = _columns(stored)
        rows, likes = range(len(stored)), None
        plan = RestorePlan(
            StoredInfos(stored), lambda values: nest_columns(keys, kinds, values), checkpoint.directory
        )

    specs = _specs(checkpoint.leaves)
    found = [specs[row] for row in rows]
    wanted = Wanted(rows, found, _handlers(run, checkpoint, rows, found, likes), likes)

    def make(place: int) -> ReadLeaf:
        stored = checkpoint.leaves[rows[place]]
        like = Match(stored, None if likes is None else likes[place], has_like=likes is not None)
        return _plan_leaf(run, checkpoint, place, like, wanted.handlers[place], differences)

    packs: list[ReadPack] = []
    others: Sequence[int] = range(len(rows))
    if not located.mmap:
        packs, others = make_packs(checkpoint, wanted, run.limits, make)

    leaves = [make(place) for place in others]
    if differences:
        raise StructureMismatchError(checkpoint.path, differences)

    return plan, packs, in_parts(run, checkpoint, leaves)


def _match_like(
    run: RestoreRun, located: Located
) -> tuple[RestorePlan, Sequence[int], Sequence[Any], list[TreeDifference]]:
    """Find the stored leaf for each leaf of the target.

    Returns:
        The plan, places in the stored leaves, the targets that have one, and how the trees differ.
    """
    stored = located.checkpoint.leaves
    infos, likes, treedef = run.shared.of(StructureCache).flatten(located.like)
    unflatten = partial(cast("Any", tree_util).tree_unflatten, treedef)
    plan = RestorePlan(infos, unflatten, located.checkpoint.directory)
    wanted = [info.keys for info in infos]
    keys = _columns(stored)[0]
    if wanted == list(keys):
        return plan, range(len(wanted)), likes, []

    on_disk = {path: row for row, path in enumerate(keys)}
    rows = [on_disk.get(path) for path in wanted]
    if None not in rows and len(rows) == len(keys):
        return plan, cast("list[int]", rows), likes, []

    flat = [FlatLeaf(info, value) for info, value in zip(infos, likes, strict=True)]
    _, differences = match(flat, stored)
    there = [(row, like) for row, like in zip(rows, likes, strict=True) if row is not None]
    return plan, [row for row, _ in there], [like for _, like in there], differences


@final
class StoredInfos(Sequence[ParamInfo]):
    """Where stored leaves stand, made only for whoever asks."""

    __slots__ = ("_stored",)

    def __init__(self, stored: Sequence[StoredLeaf]) -> None:
        self._stored = stored

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, at: int, /) -> ParamInfo: ...
    @overload
    def __getitem__(self, at: slice, /) -> tuple[ParamInfo, ...]: ...
    def __getitem__(self, at: int | slice, /) -> ParamInfo | tuple[ParamInfo, ...]:
        if isinstance(at, slice):
            return tuple([stored.info for stored in self._stored[at]])

        return self._stored[at].info


def _columns(
    stored: Sequence[StoredLeaf],
) -> tuple[Sequence[KeyPath], Sequence[tuple[KeyKind, ...]]]:
    if isinstance(stored, LeafColumns):
        return stored.keys, stored.kinds

    return [leaf.info.keys for leaf in stored], [leaf.info.kinds for leaf in stored]


def _specs(stored: Sequence[StoredLeaf]) -> Sequence[LeafSpec]:
    return stored.specs if isinstance(stored, LeafColumns) else [leaf.spec for leaf in stored]


def _handlers(
    run: RestoreRun,
    checkpoint: StoredCheckpoint,
    rows: Sequence[int],
    specs: Sequence[LeafSpec],
    likes: Sequence[Any] | None,
) -> list[LeafHandler]:
    """Find who restores each leaf: the handler of the type that is wanted, or of the stored one."""
    wanted: list[Any]
    if likes is None:
        wanted = [spec.typestr for spec in specs]
    else:
        types: list[type] = list(map(type, likes))
        wanted = list(types)
        if any(issubclass(kind, type) for kind in set(types)):  # a leaf may be a type itself
            wanted = [like if isinstance(like, type) else type(like) for like in likes]

    def find(kind: Any) -> LeafHandler:
        key_path = checkpoint.leaves[rows[wanted.index(kind)]].info.key_path
        if isinstance(kind, str):
            return run.registry.for_typestr(kind, key_path)

        return run.registry.lookup(kind, key_path)

    known = {kind: find(kind) for kind in dict.fromkeys(wanted)}
    return list(map(known.__getitem__, wanted))


def _plan_leaf(
    run: RestoreRun,
    checkpoint: StoredCheckpoint,
    index: int,
    found: Match,
    handler: LeafHandler,
    differences: list[TreeDifference],
) -> ReadLeaf:
    stored = found.stored
    target = handler.target(stored, found.like, found.has_like)
    if isinstance(target, TreeDifference):
        differences.append(target)
        target = Target()

    piece_bytes = run.limits.piece_bytes
    reads = tuple(
        read for region in target.regions for read in checkpoint.reads(index, stored, region, piece_bytes)
    )
    if len(target.regions) > 1:
        reads = join_reads(reads, piece_bytes)

    return ReadLeaf(index, stored, handler, target, reads)


def match(
    flat: Sequence[FlatLeaf], stored_leaves: Sequence[StoredLeaf]
) -> tuple[list[Match], list[TreeDifference]]:
    """Pair the leaves of a target with those on disk, by key path.

    None and empty containers count as leaves, with one exception: one on disk that the target does
    not know is no difference, since it carries nothing and some classes leave no trace of theirs.

    Returns:
        One match for each leaf of the target that has one, in its order, and the differences.
    """
    on_disk = {stored.info.keys: stored for stored in stored_leaves}
    wanted = {found.info.keys for found in flat}
    missing = [found for found in flat if found.info.keys not in on_disk]
    unexpected = [
        stored
        for stored in stored_leaves
        if stored.info.keys not in wanted and not stored.spec.is_empty_marker
    ]
    matches = [
        Match(on_disk[found.info.keys], found.value, has_like=True)
        for found in flat
        if found.info.keys in on_disk
    ]
    return matches, _differences(missing, unexpected)


def _differences(missing: Sequence[FlatLeaf], unexpected: Sequence[StoredLeaf]) -> list[TreeDifference]:
    here = {found.info.name: found.info.key_path for found in missing}
    there = {stored.info.name: stored.info.key_path for stored in unexpected}
    differences = [
        TreeDifference(
            "missing",
            found.info.key_path,
            in_like=_describe(found.value),
            suggestion=_nearest(found.info.name, there) if at < MOST_SUGGESTIONS else "",
        )
        for at, found in enumerate(missing)
    ]
    differences += [
        TreeDifference(
            "unexpected",
            stored.info.key_path,
            on_disk=_describe_stored(stored),
            suggestion=_nearest(stored.info.name, here) if at < MOST_SUGGESTIONS else "",
        )
        for at, stored in enumerate(unexpected)
    ]
    return differences


def _nearest(name: str, others: dict[str, str]) -> str:
    near = get_close_matches(name, list(others)[:MOST_CANDIDATES], n=1, cutoff=0.75)
    return others[near[0]] if near else ""


def _describe(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__

    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None else f"{dtype}{list(shape)}"


def _describe_stored(stored: StoredLeaf) -> str:
    spec = stored.spec
    return spec.typestr if spec.shape is None else f"{spec.dtype}{list(spec.shape)}"
