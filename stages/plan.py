"""Decides what to read, from what is on disk and what the caller wants."""

from __future__ import annotations

__all__ = ("Plan", "match")

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, cast, final

from jax import tree_util

from penstock.kernel.adapter import AdaptedHandler
from penstock.kernel.errors import StructureMismatchError, TreeDifference
from penstock.kernel.messages import LeafBatch, Located, ReadLeaf, StoredLeaf, Target
from penstock.kernel.protocols import LeafHandler, StoredCheckpoint
from penstock.kernel.run import Outline, RestoreRun
from penstock.kernel.stage import Actor
from penstock.stages.batching import batched
from penstock.stages.joining import join_reads
from penstock.stages.onto import plan_onto
from penstock.stages.trees import FlatLeaf, flatten_tree, nest

MOST_SUGGESTIONS = 40  # a search for the nearest name compares with every other,
MOST_CANDIDATES = 2_000  # so both are bounded: a wholly different tree has thousands


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """Takes the `Located`, yields `LeafBatch[ReadLeaf]`es in the order of the result.

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
            leaves = await run.threads.run(_plan, run, located)
            run.progress.plan(len(leaves), sum(leaf.nbytes for leaf in leaves))
            for batch in batched(leaves, run.limits):
                yield batch
                del batch  # the leaves belong to whoever comes next

        yield plan


@dataclass(frozen=True, slots=True)
class Match:
    """A stored leaf, and what the target has in its place."""

    stored: StoredLeaf
    like: Any
    has_like: bool


def _plan(run: RestoreRun, located: Located) -> list[ReadLeaf]:
    checkpoint = located.checkpoint
    if located.options is not None:
        return plan_onto(run, located, located.options, match)

    differences: list[TreeDifference] = []
    if located.has_like:
        flat, treedef = flatten_tree(located.like)
        matches, differences = match(flat, checkpoint.leaves)
        infos = [found.info for found in flat]
        run.outline = Outline(infos, lambda values: cast("Any", tree_util).tree_unflatten(treedef, values))
    else:
        matches = [Match(stored, None, has_like=False) for stored in checkpoint.leaves]
        infos = [stored.info for stored in checkpoint.leaves]
        run.outline = Outline(infos, lambda values: nest(infos, values))

    leaves = [_plan_leaf(run, checkpoint, at, found, differences) for at, found in enumerate(matches)]
    if differences:
        raise StructureMismatchError(checkpoint.path, differences)

    return leaves


def _plan_leaf(
    run: RestoreRun, checkpoint: StoredCheckpoint, index: int, found: Match, differences: list[TreeDifference]
) -> ReadLeaf:
    stored = found.stored
    handler = _handler_for(run, found)
    if isinstance(handler, AdaptedHandler):
        if stored.spec.typestr != handler.typestr:
            differences.append(
                TreeDifference(
                    "type", stored.info.key_path, _describe(found.like), on_disk=_describe_stored(stored)
                )
            )

        # Its files lie beside the documents, so it must know where those are.
        info = replace(stored.info, directory=stored.info.directory or checkpoint.path)
        return ReadLeaf(index, replace(stored, info=info), handler)

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


def _handler_for(run: RestoreRun, found: Match) -> LeafHandler | AdaptedHandler:
    key_path = found.stored.info.key_path
    if not found.has_like:
        return run.registry.for_typestr(found.stored.spec.typestr, key_path)

    wanted = found.like if isinstance(found.like, type) else type(found.like)
    return run.registry.lookup(wanted, key_path)


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
