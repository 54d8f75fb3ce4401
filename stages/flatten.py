"""The first stage of a save: flattens the tree and checks every leaf before a byte is written."""

from __future__ import annotations

__all__ = ("Flatten",)

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, final

from penstock.kernel.messages.changed_specs import CodecChoice, LeafChange, SpecChange, resolved_spec
from penstock.kernel.messages.leaves import Leaf, Leaves
from penstock.kernel.messages.save import LeafBatch, SavePlan, TreeToSave
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.layouts import FormattedLayout
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.reports.statistics import Advice
from penstock.stages.files.free_space import check_room
from penstock.stages.messages.batching import batched_columns
from penstock.stages.messages.planned_leaves import refuse_global
from penstock.stages.pytree.describing import Describer, SavedTrees
from penstock.stages.pytree.save_args import each_leaf
from penstock.stages.pytree.structure_cache import NodeTypes, StructureCache
from penstock.stages.reuse.incremental import set_aside
from penstock.stages.reuse.leaf_digests import take_digests
from penstock.stages.reuse.value_cache import references_to


@final
@dataclass(frozen=True, slots=True)
class Flatten:
    """Takes a `TreeToSave`, yields `LeafBatch`es in flatten order.

    Everything that can be checked without reading a leaf's bytes is checked here: an existing destination, a
    missing handler, a type or dtype that cannot be stored, a deleted array, a name that two leaves share or
    that the layout cannot store, more bytes than the medium has room for. When a tree is saved again, leaves
    with the same signature are not described again. Leaves that the base checkpoint already holds are set
    aside. Every batch refers to the plan, even the empty one of a save that has nothing to write.
    """

    messages: ClassVar[Messages] = {TreeToSave: LeafBatch[Leaf]}
    advice: ClassVar[Advice] = Advice(
        work=(
            "Its time grows with the number of leaves: save fewer and larger ones, as by stacking "
            "the layers of a model."
        ),
        few_leaves=(
            "For so few leaves that is what a first save loads (`penstock.warm_up()` does it before), or a "
            "type handler that takes its time."
        ),
    )

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def flatten(message: TreeToSave, /) -> AsyncIterator[LeafBatch[Leaf]]:
            if run.operation is None and run.base is None and not run.by_digest:
                planned = await run.threads.run(_plan_all, run, message)  # in one trip to a thread
            else:
                leaves, plan = await run.threads.run(_plan, run, message)
                leaves, plan = await _chosen(run, leaves, plan, message.codec_choice)
                planned = await run.threads.run(_in_batches, run, leaves, plan)
                del leaves

            run.progress.plan(planned.n_leaves, planned.nbytes)
            run.progress.advance(planned.n_leaves - planned.n_to_write, 0)
            while planned.batches:
                yield planned.batches.pop()  # the next stage owns the leaves

        yield flatten


@final
@dataclass(frozen=True, slots=True)
class _Planned:
    """The plan of what a save will write. Made in a thread: it takes a few microseconds for each leaf."""

    batches: list[LeafBatch[Leaf]]  #: the last one first
    n_leaves: int  #: of the tree
    n_to_write: int
    nbytes: int  #: array bytes to be written


async def _chosen(
    run: SaveRun, leaves: Leaves, plan: SavePlan, choice: CodecChoice | None
) -> tuple[Leaves, SavePlan]:
    """Return the leaves that this process must write, and the plan with what becomes of the others."""
    if run.operation is not None:
        from penstock.stages.joint.division import divided  # one process needs nothing of it

        return await divided(run, run.operation, leaves, plan, choice)

    if run.by_digest:
        plan = replace(plan, digests=await take_digests(run, leaves))
    if run.base is not None:
        leaves, plan = await set_aside(run, leaves, plan)
        await run.threads.run(check_room, run, leaves, plan)

    return leaves, plan


def _plan_all(run: SaveRun, message: TreeToSave) -> _Planned:
    return _in_batches(run, *_plan(run, message))


def _in_batches(run: SaveRun, leaves: Leaves, plan: SavePlan) -> _Planned:
    """Divide the leaves into batches, which hold their values from then on."""
    sizes = [spec.nbytes for spec in plan.specs] if plan.joint is None else plan.joint.shares
    nbytes = sum([sizes[index] for index in leaves.indices])
    n_to_write = len(leaves)
    batches = list(batched_columns(leaves, run.limits, plan=plan)) or [LeafBatch((), plan=plan)]
    batches.reverse()
    return _Planned(batches, len(plan.infos), n_to_write, nbytes)


def _plan(run: SaveRun, message: TreeToSave) -> tuple[Leaves, SavePlan]:
    """Check the destination; describe every leaf that an earlier save of the same tree did not."""
    run.workspace.check_now()
    tree = message.take()
    infos, values, _ = run.shared.of(StructureCache).flatten(tree, run.process)
    if isinstance(run.layout, FormattedLayout) and run.layout.save_format.rich_types:
        infos = run.shared.of(NodeTypes).of(tree, infos)

    del tree
    trees = run.shared.of(SavedTrees)
    asked = each_leaf(run.save_args, infos, run.process)
    is_local = run.operation is not None and run.operation.is_local
    known = trees.find(infos)
    if known is not None and (known.save_args != asked or known.is_local != is_local):
        known = None

    found = Describer(run, asked).describe(infos, values, known)
    if run.operation is not None and found is not known:
        from penstock.stages.joint.balancing import balanced, each_its_own

        divide = each_its_own if is_local else balanced
        found = replace(found, specs=divide(found.specs), is_local=is_local)

    handlers = found.handlers
    leaves = Leaves(range(len(infos)), found.specs, values, infos, handlers)
    if found is not known:
        _check_processes(run, leaves)
        if not message.changes:  # otherwise the changed leaves are checked, each time
            run.layout.check(leaves.without_values())
            trees.keep(found)

    specs, changes = resolved(found.specs, message.changes)
    if message.changes:
        run.layout.check(replace(leaves, specs=specs, values=None))

    plan = SavePlan(
        infos=infos,
        specs=specs,
        handlers=handlers,
        references=references_to(infos, values, handlers),
        changes=changes,
        sizes_known=not (found.coded or any(specs[index].codec is not None for index in changes)),
    )
    if run.base is None or run.operation is not None:  # otherwise once it is known what is linked
        check_room(run, leaves, plan)

    return leaves, plan


def _check_processes(run: SaveRun, leaves: Leaves) -> None:
    """Refuse arrays of which processes hold parts that take no part in the save.

    Raises:
        InvalidLeafError: For the first of them.
    """
    if run.operation is None:
        refuse_global(leaves)
        return

    from penstock.stages.joint.active_processes import check_active  # one process needs nothing of it

    check_active(leaves, run.operation.processes)


def resolved(
    specs: Sequence[LeafSpec], changes: Sequence[tuple[str, SpecChange]]
) -> tuple[Sequence[LeafSpec], Mapping[int, LeafChange]]:
    """Return the leaves after all declared changes, and which stages change which leaf. Pure.

    Specs that are one object stay one object, so that they can be compared by identity.
    """
    if not changes:
        return specs, {}

    known: dict[int, tuple[LeafSpec, LeafChange | None]] = {}
    for spec in specs:
        if id(spec) not in known:
            after, stages = spec, list[str]()
            for name, change in changes:
                before, after = after, resolved_spec(after, change)
                if after is not before:
                    stages.append(name)

            known[id(spec)] = after, LeafChange(tuple(stages), spec) if stages else None

    found = [known[id(spec)] for spec in specs]
    changed = {index: change for index, (_, change) in enumerate(found) if change is not None}
    return [spec for spec, _ in found], changed
