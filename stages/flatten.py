"""The first stage of a save: the tree to its leaves, every one of them checked before a byte is written."""

from __future__ import annotations

__all__ = ("Flatten",)

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, final

from penstock.kernel.adapter import AdaptedHandler
from penstock.kernel.capabilities import ChunkingHandler, FormattedLayout
from penstock.kernel.errors import InvalidLeafError
from penstock.kernel.messages import Leaf, LeafBatch, LeafSpec, ParamInfo, TreeToSave
from penstock.kernel.protocols import LeafHandler, SigningHandler
from penstock.kernel.run import SaveRun
from penstock.kernel.save_format import SaveArgs
from penstock.kernel.stage import Actor
from penstock.stages.batching import batched
from penstock.stages.known_values import references_to
from penstock.stages.save_args import each_leaf
from penstock.stages.saved_trees import SavedTree, SavedTrees
from penstock.stages.structure import StructureCache
from penstock.stages.unchanged import set_aside, take_digests

LARGE_TOGETHER = 8  # arrays that are on the host already are staged in one trip to a thread


@final
@dataclass(frozen=True, slots=True)
class Flatten:
    """Takes a `TreeToSave`, yields `LeafBatch`es in flatten order.

    Everything that can be wrong with a leaf without reading its bytes is an error here: no handler,
    a type or dtype that cannot be stored, a deleted array, a name that two leaves share or that the
    layout cannot store. A tree that was saved before is not described again: leaves that have the same
    signature are what they were. Leaves that the base of the save holds already are set aside.
    """

    @property
    def concurrency(self) -> int:
        """One: there is one tree."""
        return 1

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def flatten(message: TreeToSave, /) -> AsyncIterator[LeafBatch[Leaf]]:
            leaves = await run.threads.run(_plan, run, message)
            run.planned = [leaf.info for leaf in leaves]
            run.specs = [leaf.spec for leaf in leaves]
            if run.by_digest:
                await take_digests(run, leaves)
            if run.base is not None:
                leaves = await set_aside(run, leaves)

            run.progress.plan(len(run.planned), sum([leaf.spec.nbytes for leaf in leaves]))
            run.progress.advance(len(run.planned) - len(leaves), 0)
            for batch in batched(leaves, run.limits, together=LARGE_TOGETHER):
                yield batch
                del batch  # the leaves belong to whoever comes next

        yield flatten


def _plan(run: SaveRun, message: TreeToSave) -> list[Leaf]:
    """Describe every leaf, as far as an earlier save of the same tree did not."""
    infos, values, _ = run.shared.of(StructureCache).flatten(message.take())
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
        run.layout.check(staged)
        coded = any(leaf.spec.codec is not None for leaf in staged)
        known = SavedTree(infos, staged, describer.signatures, asked, coded)
        trees.keep(known)

    run.preallocate = not known.coded
    run.references = references_to([(leaf.info.name, leaf.value, leaf.handler) for leaf in leaves])
    return leaves


@final
class _Describer:
    """Makes the leaves of one tree."""

    __slots__ = (
        "_asked",
        "_directory",
        "_handlers",
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
        self._directory = run.workspace.path(run.folder)
        # For each type: its handler, and how that tells whether a value is of a known kind.
        self._handlers: dict[type, tuple[LeafHandler | AdaptedHandler, Callable[[Any], object] | None]] = {}
        self._specs: dict[tuple[int, object], LeafSpec] = {}
        self.changed = False  #: whether a leaf is not what it was
        self.signatures: list[object] = []

    def leaf(self, index: int, info: ParamInfo, value: object, known: SavedTree | None) -> Leaf:
        type_ = type(value)
        if type_ not in self._handlers:
            self._handlers[type_] = self._handler(type_, info)

        handler, sign = self._handlers[type_]
        signature = None if sign is None else sign(value)
        self.signatures.append(signature)
        if known is not None:
            before = known.leaves[index]
            if signature is not None and before.handler is handler and known.signatures[index] == signature:
                return Leaf(index, info, value, before.spec, handler, before)

        if isinstance(handler, AdaptedHandler):
            info = replace(info, directory=self._directory)

        described = self._describe(handler, value, info, signature)
        spec = self._fitted(described, index, info, handler)
        if known is not None and known.leaves[index].spec == spec and known.leaves[index].handler is handler:
            before = known.leaves[index]
            if before.info is info:
                return Leaf(index, info, value, before.spec, handler, before)

        self.changed = True
        return Leaf(index, info, value, spec, handler, Leaf(index, info, None, spec, handler))

    def _fitted(
        self, spec: LeafSpec, index: int, info: ParamInfo, handler: LeafHandler | AdaptedHandler
    ) -> LeafSpec:
        if spec.shape is None:
            return spec

        asked = self._asked[index] if self._asked else None
        if self._layout is not None and isinstance(handler, ChunkingHandler) and handler.follows_spec:
            return self._layout.fit(spec, info, asked)
        if asked is not None and asked.dtype is not None:
            problem = "neither its handler nor the layout can store it in another dtype than its own"
            raise InvalidLeafError(info.key_path, problem)

        return spec

    def _describe(
        self, handler: LeafHandler | AdaptedHandler, value: object, info: ParamInfo, signature: object
    ) -> LeafSpec:
        """Describe a value; one object for all leaves whose signature is the same."""
        if signature is None:
            return handler.describe(value, info)

        key = (id(handler), signature)
        try:
            spec = self._specs.get(key)
        except TypeError:  # a signature need not be hashable
            return handler.describe(value, info)

        if spec is None:
            spec = self._specs[key] = handler.describe(value, info)

        return spec

    def _handler(
        self, type_: type, info: ParamInfo
    ) -> tuple[LeafHandler | AdaptedHandler, Callable[[Any], object] | None]:
        handler = self._registry.lookup(type_, info.key_path)
        return handler, handler.signature if isinstance(handler, SigningHandler) else None
