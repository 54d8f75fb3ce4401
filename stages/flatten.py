"""The first stage of a save: flattens the tree and checks every leaf before a byte is written."""

from __future__ import annotations

__all__ = ("Flatten",)

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from penstock.kernel.config.save_format import SaveArgs
from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.messages.changed_specs import LeafChange, SpecChange, resolved_spec
from penstock.kernel.messages.save import Leaf, LeafBatch, SavePlan, TreeToSave
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.layouts import FormattedLayout
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import ChunkingHandler, LeafHandler, SigningHandler
from penstock.stages.common.batching import batched
from penstock.stages.common.free_space import check_room
from penstock.stages.pytree.description_cache import SavedTree, SavedTrees
from penstock.stages.pytree.node_types import NodeTypes
from penstock.stages.pytree.save_args import each_leaf
from penstock.stages.pytree.structure_cache import StructureCache
from penstock.stages.reuse.incremental import set_aside, take_digests
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

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def flatten(message: TreeToSave, /) -> AsyncIterator[LeafBatch[Leaf]]:
            leaves, plan = await run.threads.run(_plan, run, message)
            if run.by_digest:
                plan = replace(plan, digests=await take_digests(run, leaves))
            if run.base is not None:
                leaves, plan = await set_aside(run, leaves, plan)
                await run.threads.run(check_room, run, leaves, plan)

            n_leaves = len(plan.infos)
            run.progress.plan(n_leaves, sum([plan.specs[leaf.index].nbytes for leaf in leaves]))
            run.progress.advance(n_leaves - len(leaves), 0)
            if not leaves:
                yield LeafBatch((), plan=plan)

            for batch in batched(leaves, run.limits, plan=plan):
                yield batch
                del batch  # the next stage owns the leaves

        yield flatten


def _plan(run: SaveRun, message: TreeToSave) -> tuple[list[Leaf], SavePlan]:
    """Check the destination; describe every leaf that an earlier save of the same tree did not."""
    run.workspace.check_now()
    tree = message.take()
    infos, values, _ = run.shared.of(StructureCache).flatten(tree)
    if isinstance(run.layout, FormattedLayout) and run.layout.save_format.rich_types:
        infos = run.shared.of(NodeTypes).of(tree, infos)

    del tree
    trees = run.shared.of(SavedTrees)
    asked = each_leaf(run.save_args, infos)
    known = trees.find(infos)
    if known is not None and known.save_args != asked:
        known = None

    describer = _Describer(run, asked)
    leaves = [
        describer.leaf(index, info, value, known)
        for index, (info, value) in enumerate(zip(infos, values, strict=True))
    ]
    del values
    if known is None or describer.changed:
        staged = tuple([leaf.without_value() for leaf in leaves])
        coded = any(leaf.spec.codec is not None for leaf in staged)
        known = SavedTree(infos, staged, describer.signatures, asked, coded)
        if not message.changes:  # otherwise the changed leaves are checked, each time
            run.layout.check(staged)
            trees.keep(known)

    specs, changes = resolved([leaf.spec for leaf in leaves], message.changes)
    if message.changes:
        run.layout.check([replace(leaf, spec=spec) for leaf, spec in zip(known.leaves, specs, strict=True)])

    plan = SavePlan(
        infos=infos,
        specs=specs,
        references=references_to([(leaf.info.name, leaf.value, leaf.handler) for leaf in leaves]),
        changes=changes,
        sizes_known=not (known.coded or any(specs[index].codec is not None for index in changes)),
    )
    if run.base is None:  # otherwise once it is known what is linked
        check_room(run, leaves, plan)

    return leaves, plan


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


@final
class _Describer:
    """Makes the leaves of one tree."""

    __slots__ = (
        "_asked",
        "_kinds",
        "_layout",
        "_registry",
        "_specs",
        "changed",
        "signatures",
    )

    def __init__(self, run: SaveRun, asked: Sequence[SaveArgs | None]) -> None:
        self._layout = run.layout if isinstance(run.layout, FormattedLayout) else None
        self._asked = asked
        self._registry = run.registry
        self._kinds: dict[type, _Kind] = {}
        self._specs: dict[tuple[int, object], LeafSpec] = {}
        self.changed = False  #: whether any leaf differs from the last save's description
        self.signatures: list[object] = []

    def leaf(self, index: int, info: ParamInfo, value: object, known: SavedTree | None) -> Leaf:
        type_ = type(value)
        kind = self._kinds.get(type_)
        if kind is None:
            kind = self._kinds[type_] = self._kind(type_, info)

        handler = kind.handler
        signature = None if kind.sign is None else kind.sign(value)
        self.signatures.append(signature)
        if known is not None:
            before = known.leaves[index]
            if signature is not None and before.handler is handler and known.signatures[index] == signature:
                return Leaf(index, info, value, before.spec, handler).as_described(before)

        spec = self._spec(kind, value, index, info, signature)
        if known is not None and known.leaves[index].spec == spec and known.leaves[index].handler is handler:
            before = known.leaves[index]
            if before.info is info:
                return Leaf(index, info, value, before.spec, handler).as_described(before)

        self.changed = True
        return Leaf(index, info, value, spec, handler).as_described()

    def _spec(self, kind: _Kind, value: object, index: int, info: ParamInfo, signature: object) -> LeafSpec:
        """Return how a value is stored; one object for all leaves of one signature without save_args."""
        asked = self._asked[index] if self._asked else None
        if signature is None or asked is not None:
            return self._fitted(kind, kind.handler.describe(value, info), info, asked)

        key = (id(kind.handler), signature)
        try:
            spec = self._specs.get(key)
        except TypeError:  # a signature need not be hashable
            return self._fitted(kind, kind.handler.describe(value, info), info, asked)

        if spec is None:
            spec = self._specs[key] = self._fitted(kind, kind.handler.describe(value, info), info, asked)

        return spec

    def _fitted(self, kind: _Kind, spec: LeafSpec, info: ParamInfo, asked: SaveArgs | None) -> LeafSpec:
        if spec.shape is None:
            return spec
        if self._layout is not None and kind.follows_spec:
            return self._layout.fit(spec, info, asked)
        if asked is not None and asked.dtype is not None:
            problem = "neither its handler nor the layout can store it in another dtype than its own"
            raise InvalidLeafError(info.key_path, problem)

        return spec

    def _kind(self, type_: type, info: ParamInfo) -> _Kind:
        handler = self._registry.lookup(type_, info.key_path)
        return _Kind(
            handler,
            handler.signature if isinstance(handler, SigningHandler) else None,
            isinstance(handler, ChunkingHandler) and handler.follows_spec,
        )


@final
@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known about all values of one type."""

    handler: LeafHandler
    sign: Callable[[Any], object] | None  #: the handler's `signature`, if it has one
    follows_spec: bool  #: whether it honours the layout's chunks and dtype
