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
from typing import Any, ClassVar, Final, cast, final

from penstock.kernel.errors import (
    HandlerFailedError,
    InvalidLeafError,
    KeeperLostError,
    NoSpaceError,
    SpecError,
)
from penstock.kernel.memory.bounded_cache import BoundedCache, ByIdentity
from penstock.kernel.messages.changed_specs import CodecChoice, LeafChange, SpecChange, resolved_spec
from penstock.kernel.messages.save import LeafBatch, Leaves, SavePlan, TreeToSave
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.protocols.leaf import ChosenInfos, KeyPath, LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import ChunkingHandler, LeafHandler
from penstock.kernel.protocols.save_format import SaveArgs
from penstock.stages.messages.batching import batched_columns
from penstock.stages.pytree.flattening import (
    ALONE,
    NodeTypes,
    StructureCache,
    check_levels,
    flatten_tree,
    is_empty,
)
from penstock.stages.reuse.base_comparison import may_be_linked, take_digests, unchanged_on_host
from penstock.stages.reuse.incremental import set_aside
from penstock.stages.reuse.value_cache import references_to


@final
@dataclass(frozen=True, slots=True, eq=False)
class Descriptions:
    """The descriptions that one handler gave of the leaves of a tree."""

    known: dict[Any, LeafSpec]  #: the handler's own: see `LeafHandler.describe`
    stored: dict[tuple[int, int], tuple[LeafSpec, LeafSpec]] = field(
        default_factory=dict[tuple[int, int], "tuple[LeafSpec, LeafSpec]"]
    )
    """Each description with the spec of what is stored, by the identities of the description and of the
    `SaveArgs`, which need not be hashable."""


_BYTES_OF_A_LEAF: Final = 32  # two references, and a part in specs that are shared
_BYTES_OF_A_DESCRIPTION: Final = 1000


@final
@dataclass(frozen=True, slots=True, eq=False)
class SavedTree:
    """The leaves of one tree, without their values."""

    infos: Sequence[ParamInfo]  #: the same object that the structure cache returns for this structure
    specs: Sequence[LeafSpec]
    handlers: Sequence[LeafHandler]
    save_args: Sequence[object] = ()  #: one for each leaf; empty if there were none
    coded: bool = False  #: whether any leaf has a codec
    spread: bool = False  #: whether other processes hold parts of any leaf
    descriptions: Mapping[int, Descriptions] = field(default_factory=dict[int, Descriptions])
    """By the identity of the handler."""
    is_local: bool = False  #: whether each process writes all that it holds, on a disk of its own


def describe(
    run: SaveRun,
    infos: Sequence[ParamInfo],
    values: Sequence[object],
    asked: Sequence[SaveArgs | None],
    before: SavedTree | None,
) -> SavedTree:
    """Find the handler and the spec of each leaf of a tree. Blocking.

    Args:
        run: The save.
        infos: Where the leaves stand.
        values: The leaves.
        asked: The options of each leaf; empty if there are none.
        before: A tree of this structure, with these options, that was saved before.

    Returns:
        `before` itself if nothing differs. Leaves that are described alike share one spec.

    Raises:
        HandlerError: If no handler takes a leaf's type.
        SpecError: If a leaf cannot be stored, or not as asked for.
    """
    # Leaves of one type and with the same options go together. Options need not be hashable.
    groups: dict[Any, list[int]] = {}
    kinds = zip(map(type, values), map(id, asked), strict=True) if asked else map(type, values)
    for number, kind in enumerate(kinds):
        group = groups.get(kind)
        if group is None:
            groups[kind] = [number]
        else:
            group.append(number)

    specs: list[Any] = [None] * len(infos)
    handlers: list[Any] = [None] * len(infos)
    descriptions: dict[int, Descriptions] = {}
    in_use: set[int] = set()
    for group in groups.values():
        first, args = infos[group[0]], asked[group[0]] if asked else None
        handler = run.registry.lookup(type(values[group[0]]), first.key_path)
        old = None if before is None else before.descriptions.get(id(handler))
        found = descriptions.get(id(handler))
        if found is None:
            found = descriptions[id(handler)] = Descriptions({} if old is None else dict(old.known))

        given = handler.describe([values[at] for at in group], ChosenInfos(infos, group), found.known)
        if len(given) != len(group):
            problem = f"it returned {len(given)} specs for {len(group)} leaves"
            raise HandlerFailedError(first.key_path, f"describe of {handler.typestr}", problem)

        stored: dict[int, LeafSpec] = {}  # of each description, which `given` keeps alive
        for number, spec in zip(group, given, strict=True):
            after = stored.get(id(spec))
            if after is None:
                pair = id(spec), id(args)
                both = None if old is None else old.stored.get(pair)
                both = both or (spec, _stored(run, handler, spec, infos[number], args))
                after = stored[id(spec)] = both[1]
                if spec.shape is not None:  # a text is of one leaf, and as quickly described
                    found.stored[pair] = both

            specs[number] = after
            handlers[number] = handler

        in_use.update(stored)

    if before is not None and all(map(is_, handlers, before.handlers)):
        if not all(map(is_, specs, before.specs)):
            specs = [old if old == spec else spec for old, spec in zip(before.specs, specs, strict=True)]
        if all(map(is_, specs, before.specs)):
            return before

    if before is not None:  # forget what describes no leaf any more: shapes may change from save to save
        for found in descriptions.values():
            for kind in [kind for kind, spec in found.known.items() if id(spec) not in in_use]:
                del found.known[kind]

    coded = spread = False
    for found in descriptions.values():
        for _, spec in found.stored.values():
            coded = coded or spec.codec is not None
            spread = spread or spec.replicas.is_global

    return SavedTree(infos, specs, handlers, asked, coded, spread, descriptions)


def _stored(
    run: SaveRun, handler: LeafHandler, spec: LeafSpec, info: ParamInfo, asked: SaveArgs | None
) -> LeafSpec:
    """Return how the layout stores a leaf that its handler described."""
    if spec.shape is None:
        return spec
    if run.layout.arrays is not None and isinstance(handler, ChunkingHandler) and handler.follows_spec:
        return run.layout.arrays.fit(spec, info, asked)
    if asked is not None and asked.dtype is not None:
        problem = "neither its handler nor the layout can store it in another dtype than its own"
        raise InvalidLeafError(info.key_path, problem)

    return spec


@final
@dataclass(frozen=True, slots=True)
class Flatten:
    """Takes a `TreeToSave`, yields `LeafBatch`es in flatten order.

    Everything that can be checked without reading a leaf's bytes is checked here: an existing destination, a
    missing handler, a type or dtype that cannot be stored, a deleted array, a name that two leaves share or
    that the layout cannot store, more bytes than the medium has room for. When a tree is saved again, leaves
    of a known kind are not described again. Leaves that the base checkpoint already holds are set
    aside. Every batch refers to the plan, even the empty one of a save that has nothing to write.
    """

    messages: ClassVar[Messages] = {TreeToSave: LeafBatch}
    advice: ClassVar[Advice] = Advice(
        busy=(
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
            # One trip to a thread, unless the base or other processes have to be asked in between.
            # None at all where it delays neither other processes nor the renewal of leases.
            is_brief = run.operation.is_alone and run.store.system_files is not None
            call = run.threads.run_briefly if is_brief else run.threads.run
            planned = await call(_plan_at_once, run, message)
            if not isinstance(planned, _Planned):
                leaves, plan = await _chosen(run, *planned, message.codec_choice)
                planned = await run.threads.run(_in_batches, run, leaves, plan)
                del leaves

            run.progress.plan(planned.n_leaves, planned.nbytes)
            # Linked leaves, and those that other processes write, count as done.
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
    if not run.operation.is_alone:  # one process needs nothing of the module
        from penstock.stages.joint.division import divided

        return await divided(run, leaves, plan, choice)

    if run.request.by_digest:
        plan = replace(plan, digests=await take_digests(run, leaves))
    if run.base is not None:
        leaves, plan = await set_aside(run, leaves, plan)
        await run.threads.run(_check_room, run, leaves, plan)

    return leaves, plan


def _plan_at_once(run: SaveRun, message: TreeToSave) -> _Planned | tuple[Leaves, SavePlan]:
    """Plan a save whole, if nothing has to be awaited for that; else only its leaves."""
    leaves, plan = _plan(run, message)
    if not run.operation.is_alone:
        return leaves, plan
    if may_be_linked(run, leaves, plan):
        later = unchanged_on_host(run, leaves, plan)
        if later is None or not _has_room(run, leaves, plan):  # there may be if some are linked
            return leaves, plan

        plan = replace(plan, unchanged=later)
    elif run.base is not None:
        _check_room(run, leaves, plan)

    return _in_batches(run, leaves, plan)


def _in_batches(run: SaveRun, leaves: Leaves, plan: SavePlan) -> _Planned:
    """Divide the leaves into batches, which hold their values from then on."""
    n_to_write, nbytes = len(leaves), sum(map(plan.sizes.__getitem__, leaves.indices))
    batches = list(batched_columns(leaves, run.limits, plan=plan)) or [LeafBatch((), plan=plan)]
    # So that the first is taken off the end, and nothing here keeps what was passed on.
    batches.reverse()
    return _Planned(batches, len(plan.infos), n_to_write, nbytes)


def _plan(run: SaveRun, message: TreeToSave) -> tuple[Leaves, SavePlan]:
    """Check the destination; describe every leaf that an earlier save of the same tree did not."""
    # First: a destination that exists is refused before any leaf is looked at.
    run.workspace.check()
    tree = message.take()
    infos, values, _ = StructureCache(run.caches.structures).flatten(tree, run.process)
    if run.layout.arrays is not None and run.layout.arrays.save_format.rich_types:
        infos = NodeTypes(run.caches.node_types).of(tree, infos)

    del tree
    trees: BoundedCache[ByIdentity, SavedTree] = run.caches.saved_trees
    asked = each_leaf(run.request.save_args, infos, run.process)
    is_local = run.operation.is_local
    # By identity, never by trust: the structure cache returns the same object only for an equal tree. And by
    # layout: in a bucket, or with another codec, the same leaves are stored in other chunks.
    key = ByIdentity(infos, run.layout.arrays)
    known = trees.get(key)
    if known is not None and (known.save_args != asked or known.is_local != is_local):
        known = None

    found = describe(run, infos, values, asked, known)
    if not run.operation.is_alone and found is not known:  # or else each leaf has one writer
        from penstock.stages.joint.division import balanced, local_disk_specs

        divide = local_disk_specs if is_local else balanced
        found = replace(found, specs=divide(found.specs), is_local=is_local)

    handlers = found.handlers
    leaves = Leaves(range(len(infos)), found.specs, values, infos, handlers)
    if found is not known:
        if found.spread:
            _check_processes(run, leaves)
        if not message.changes:  # otherwise the changed leaves are checked, each time
            run.layout.check(leaves.without_values())
            n_described = sum([len(each.stored) for each in found.descriptions.values()])
            nbytes = _BYTES_OF_A_LEAF * len(infos) + _BYTES_OF_A_DESCRIPTION * n_described
            trees.put(key, found, nbytes)

    specs, changes, sizes_known = found.specs, dict[int, LeafChange](), not found.coded
    if message.changes:
        specs, changes = resolved(specs, message.changes)
        run.layout.check(replace(leaves, specs=specs, values=None))
        sizes_known = sizes_known and all(specs[index].codec is None for index in changes)

    plan = SavePlan(
        infos=infos,
        specs=specs,
        handlers=handlers,
        references=references_to(infos, values, handlers),
        changes=changes,
        sizes_known=sizes_known,
    )
    if run.base is None or not run.operation.is_alone:  # otherwise once it is known what is linked
        _check_room(run, leaves, plan)

    return leaves, plan


def _check_processes(run: SaveRun, leaves: Leaves) -> None:
    """Refuse arrays of which processes hold parts that take no part in the save.

    Raises:
        InvalidLeafError: For the first of them.
    """
    if not run.operation.is_alone:  # one process needs nothing of the module
        from penstock.stages.joint.division import check_active

        check_active(leaves, run.operation.processes)
        return

    for index, spec in zip(leaves.indices, leaves.specs, strict=True):
        if spec.replicas.is_global:
            raise InvalidLeafError(
                leaves.infos[index].key_path,
                "the array has shards on other processes, and this save is of one process: save it with a "
                "penstock.Checkpointer in all of them, once jax.distributed is initialised",
            )


def resolved(
    specs: Sequence[LeafSpec], changes: Sequence[tuple[str, SpecChange]]
) -> tuple[Sequence[LeafSpec], dict[int, LeafChange]]:
    """Return the leaves after all declared changes, and which stages change which leaf. Pure.

    Specs that are one object stay one object, so that they can be compared by identity.
    """
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


def _has_room(run: SaveRun, leaves: Leaves, plan: SavePlan) -> bool:
    try:
        _check_room(run, leaves, plan)
    except NoSpaceError:
        return False

    return True


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
    sizes = list(map(plan.sizes.__getitem__, leaves.indices))
    needed = sum(sizes)
    if not needed:
        return

    try:
        free = store.free_bytes(run.path)
    except KeeperLostError:  # it was there a moment ago, or the save may do without
        return
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
