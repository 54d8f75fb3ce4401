"""The first stage of a save: flattens the tree and checks every leaf before a byte is written.

The leaves are described in columns. A tree that was saved before is mostly only compared.
"""

from __future__ import annotations

__all__ = (
    "Flatten",
    "each_leaf",
)

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, ClassVar, Final, TypeAlias, cast, final

from penstock.kernel.errors import HandlerFailedError, InvalidLeafError, NoSpaceError, SpecError
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.messages.changed_specs import CodecChoice, LeafChange, SpecChange, resolved_spec
from penstock.kernel.messages.leaves import Leaves
from penstock.kernel.messages.save import LeafBatch, SavePlan, TreeToSave
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.protocols.leaf import KeyPath, LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import ChunkingHandler, LeafHandler, SigningHandler
from penstock.kernel.protocols.save_format import SaveArgs
from penstock.stages.messages.batching import batched_columns, refuse_global
from penstock.stages.pytree.flattening import (
    ALONE,
    NodeTypes,
    StructureCache,
    check_levels,
    flatten_tree,
    is_empty,
)
from penstock.stages.reuse.base_comparison import take_digests
from penstock.stages.reuse.incremental import set_aside
from penstock.stages.reuse.value_cache import references_to


@final
class Describer:
    """Finds the handler and the spec of each leaf of a tree.

    Args:
        run: The save.
        asked: The options of each leaf; empty if there are none.
    """

    __slots__ = ("_arrays", "_asked", "_kinds", "_registry")

    def __init__(self, run: SaveRun, asked: Sequence[SaveArgs | None]) -> None:
        self._arrays = run.layout.arrays
        self._asked = asked
        self._registry = run.registry
        self._kinds: dict[type, _Kind] = {}

    def describe(
        self, infos: Sequence[ParamInfo], values: Sequence[object], known: SavedTree | None
    ) -> SavedTree:
        """Describe every leaf. Blocking.

        Args:
            infos: Where they stand.
            values: The leaves.
            known: A tree of this structure that was saved before.

        Returns:
            `known` itself if nothing differs. Leaves of one signature share one spec.

        Raises:
            HandlerError: If no handler takes a leaf's type.
            SpecError: If a leaf cannot be stored, or not as asked for.
        """
        specs: list[LeafSpec] = []
        handlers: list[LeafHandler] = []
        kinds, signed = self._kinds, dict[int, Mapping[object, LeafSpec]]() if known is None else known.signed
        for index, value in enumerate(values):
            kind = kinds.get(type(value))
            if kind is None:
                kind = kinds[type(value)] = self._kind(type(value), infos[index], signed)

            handlers.append(kind.handler)
            specs.append(self._spec(kind, value, index, infos))

        if known is not None and all(map(is_, handlers, known.handlers)):
            before = known.specs
            if all(map(is_, specs, before)):
                return known

            specs = [old if old == spec else spec for old, spec in zip(before, specs, strict=True)]
            if all(map(is_, specs, before)):
                return known

        coded = any(spec.codec is not None for spec in {id(spec): spec for spec in specs}.values())
        found = {id(kind.handler): kind.signed for kind in kinds.values()}
        return SavedTree(infos, specs, handlers, self._asked, coded, found)

    def _spec(self, kind: _Kind, value: object, index: int, infos: Sequence[ParamInfo]) -> LeafSpec:
        """Return how a value is stored; one object for all leaves of one signature and one `SaveArgs`."""
        asked = self._asked[index] if self._asked else None
        signature = None if kind.sign is None else kind.sign(value)
        if signature is None:
            return self._described(kind, value, infos[index], asked)

        key = signature if asked is None else (signature, _Identity(asked))
        try:
            spec = kind.signed.get(key)
        except TypeError:  # a signature need not be hashable
            return self._described(kind, value, infos[index], asked)

        if spec is None:
            spec = kind.before.get(key)
            if spec is None:
                spec = self._described(kind, value, infos[index], asked)

            kind.signed[key] = spec

        return spec

    def _described(self, kind: _Kind, value: object, info: ParamInfo, asked: SaveArgs | None) -> LeafSpec:
        spec = kind.handler.describe(value, info)
        if spec.shape is None:
            return spec
        if self._arrays is not None and kind.follows_spec:
            return self._arrays.fit(spec, info, asked)
        if asked is not None and asked.dtype is not None:
            problem = "neither its handler nor the layout can store it in another dtype than its own"
            raise InvalidLeafError(info.key_path, problem)

        return spec

    def _kind(self, type_: type, info: ParamInfo, signed: Signed) -> _Kind:
        handler = self._registry.lookup(type_, info.key_path)
        return _Kind(
            handler,
            handler.signature if isinstance(handler, SigningHandler) else None,
            isinstance(handler, ChunkingHandler) and handler.follows_spec,
            signed.get(id(handler), {}),
        )


@final
@dataclass(frozen=True, slots=True)
class _Identity:
    """Options, as a key that compares them by identity: they need not be hashable."""

    asked: SaveArgs = field(compare=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", id(self.asked))


@final
@dataclass(frozen=True, slots=True)
class _Kind:
    """The facts about all values of one type."""

    handler: LeafHandler
    sign: Callable[[Any], object] | None  #: the handler's `signature`, if it has one
    follows_spec: bool  #: whether it honours the layout's chunks and dtype
    before: Mapping[object, LeafSpec]  #: the spec of each signature in the tree that was saved before
    signed: dict[object, LeafSpec] = field(default_factory=dict[object, LeafSpec])  #: and in this one


_BYTES_OF_A_LEAF: Final = 32  # two references, and a part in specs that are shared


Signed: TypeAlias = Mapping[int, Mapping[object, LeafSpec]]
"""The spec of each signature, by the identity of the handler that gave it."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class SavedTree:
    """The leaves of one tree, without their values."""

    infos: Sequence[ParamInfo]  #: the same object that the structure cache returns for this structure
    specs: Sequence[LeafSpec]
    handlers: Sequence[LeafHandler]
    save_args: Sequence[object] = ()  #: one for each leaf; empty if there were none
    coded: bool = False  #: whether any leaf has a codec
    signed: Signed = field(default_factory=dict[int, Mapping[object, LeafSpec]])
    is_local: bool = False  #: whether each process writes all that it holds, on a disk of its own


@final
class SavedTrees:
    """Remembers the last few trees that were saved. Thread-safe.

    Args:
        kept: The cache, of `RunCaches`.
    """

    __slots__ = ("_known",)

    def __init__(self, kept: BoundedCache[ByIdentity, SavedTree]) -> None:
        self._known = kept

    def find(self, infos: Sequence[ParamInfo]) -> SavedTree | None:
        """Return the tree that was saved last with this `infos` object; None if it is not known."""
        return self._known.get(ByIdentity(infos))

    def keep(self, tree: SavedTree) -> None:
        """Remember `tree`; it replaces an earlier tree of the same structure."""
        self._known.put(ByIdentity(tree.infos), tree, _BYTES_OF_A_LEAF * len(tree.specs))


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

    messages: ClassVar[Messages] = {TreeToSave: LeafBatch}
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

        async def flatten(message: TreeToSave, /) -> AsyncIterator[LeafBatch]:
            alone = run.operation.is_alone  # then nothing is awaited between planning and batches, mostly
            if alone and run.base is None and not run.request.by_digest:
                planned = await run.threads.run(_plan_all, run, message)
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

    batches: list[LeafBatch]  #: the last one first
    n_leaves: int  #: of the tree
    n_to_write: int
    nbytes: int  #: array bytes to be written


async def _chosen(
    run: SaveRun, leaves: Leaves, plan: SavePlan, choice: CodecChoice | None
) -> tuple[Leaves, SavePlan]:
    """Return the leaves that this process must write, and the plan with what becomes of the others."""
    if not run.operation.is_alone:
        from penstock.stages.joint.division import divided  # one process writes all, and compares with nobody

        return await divided(run, leaves, plan, choice)

    if run.request.by_digest:
        plan = replace(plan, digests=await take_digests(run, leaves))
    if run.base is not None:
        leaves, plan = await set_aside(run, leaves, plan)
        await run.threads.run(_check_room, run, leaves, plan)

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
    run.workspace.check()
    tree = message.take()
    infos, values, _ = StructureCache(run.caches.structures).flatten(tree, run.process)
    if run.layout.arrays is not None and run.layout.arrays.save_format.rich_types:
        infos = NodeTypes(run.caches.node_types).of(tree, infos)

    del tree
    trees = SavedTrees(run.caches.saved_trees)
    asked = each_leaf(run.request.save_args, infos, run.process)
    is_local = run.operation.is_local
    known = trees.find(infos)
    if known is not None and (known.save_args != asked or known.is_local != is_local):
        known = None

    found = Describer(run, asked).describe(infos, values, known)
    if not run.operation.is_alone and found is not known:  # or else each leaf has one writer
        from penstock.stages.joint.division import balanced, each_its_own

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
    if run.base is None or not run.operation.is_alone:  # otherwise once it is known what is linked
        _check_room(run, leaves, plan)

    return leaves, plan


def _check_processes(run: SaveRun, leaves: Leaves) -> None:
    """Refuse arrays of which processes hold parts that take no part in the save.

    Raises:
        InvalidLeafError: For the first of them.
    """
    if run.operation.is_alone:
        refuse_global(leaves)
        return

    from penstock.stages.joint.division import check_active  # one process needs nothing of it

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


def each_leaf(
    asked: object, infos: Sequence[ParamInfo], process: tuple[int, int] = ALONE
) -> Sequence[SaveArgs | None]:
    """Find the `SaveArgs` of each leaf.

    Args:
        asked: None; one `SaveArgs` for all leaves; a function from a stored key path to a `SaveArgs` or
            None; or a prefix tree of them, in which each one applies to every leaf at or below its place.
            None asks for nothing special.
        infos: The infos of the leaves.
        process: The index of this process and how many there are, for what each has for itself.

    Returns:
        One entry for each leaf; empty if `asked` is None.

    Raises:
        SpecError: If `asked` is none of these.
        InvalidLeafError: If the function or the prefix tree gives something else for a leaf, or asks for
            what no leaf can have, or if the prefix tree has a place that the saved tree lacks.
        HandlerFailedError: If the function raises; its error is the cause.
    """
    if asked is None:
        return ()
    if isinstance(asked, SaveArgs):
        return [asked] * len(infos)
    if callable(asked):
        function = cast("Callable[[KeyPath], object]", asked)
        return [_answer(function, info) for info in infos]

    return _by_prefix(asked, infos, process)


def _by_prefix(
    tree: object, infos: Sequence[ParamInfo], process: tuple[int, int]
) -> Sequence[SaveArgs | None]:
    check_levels(tree)
    given = {
        found.info.keys: (_checked(found.value, found.info.key_path), found.info.key_path)
        for found in flatten_tree(tree, process=process)[0]
    }
    used: set[KeyPath] = set()
    result: list[SaveArgs | None] = []
    for info in infos:
        keys = info.keys
        place = next((keys[:n] for n in range(len(keys), -1, -1) if keys[:n] in given), None)
        if place is None:
            result.append(None)
            continue

        used.add(place)
        result.append(given[place][0])

    unused = next((path for keys, (args, path) in given.items() if keys not in used and args), None)
    if unused is not None:
        raise InvalidLeafError(unused, "save_args has an entry here, but the tree has no leaf at this place")

    return result


def _answer(function: Callable[[KeyPath], object], info: ParamInfo) -> SaveArgs | None:
    try:
        answer = function(info.keys)
    except SpecError as error:  # it made an invalid SaveArgs
        raise InvalidLeafError(info.key_path, f"save_args: {error}") from error
    except Exception as error:
        name = str(getattr(function, "__qualname__", function))
        raise HandlerFailedError(info.key_path, f"save_args={name}", repr(error)) from error

    return _checked(answer, info.key_path)


def _checked(value: object, key_path: str) -> SaveArgs | None:
    if is_empty(value):
        return None
    if isinstance(value, SaveArgs):
        return value

    problem = f"must be a SaveArgs or None, not {value!r}"
    raise (
        InvalidLeafError(key_path, f"save_args here {problem}")
        if key_path
        else SpecError(f"save_args {problem}")
    )


def _check_room(run: SaveRun, leaves: Leaves, plan: SavePlan) -> None:
    """Compare what will be written with what is free. Blocking, but for one quick call.

    Leaves that are linked to a base are not among `leaves` and do not count. What a codec leaves of a chunk
    is not known beforehand: such a save is not refused, and the event `save.may_not_fit` says that it may
    fail later.

    Raises:
        NoSpaceError: If it does not fit; names the first leaf that does not.
        StorageError: If the medium does not say.
    """
    store = run.store
    each = [spec.nbytes for spec in plan.specs] if plan.joint is None else plan.joint.shares
    sizes = [each[index] for index in leaves.indices]
    needed = sum(sizes)
    if not needed:
        return

    free = store.free_bytes(run.path)
    if free is None or needed <= free:
        return
    if not plan.sizes_known:
        run.events.warning("save.may_not_fit", path=run.path, bytes_needed=needed, bytes_free=free)
        return

    reached = 0
    for index, nbytes in zip(leaves.indices, sizes, strict=True):
        reached += nbytes
        if reached > free:
            raise NoSpaceError("save", run.path, needed, free, leaves.infos[index].key_path)
