"""Plans a restore: the shape of the result, the stored leaves to read, and the handler for each."""

from __future__ import annotations

__all__ = (
    "ResultBytes",
    "check_expansion",
    "plan_restore",
)

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, cast, final

import jax
from jax import tree_util

from penstock.kernel.concurrency.brief_steps import cuts
from penstock.kernel.errors import (
    ExpansionError,
    InsufficientMemoryError,
    SpecError,
    StructureMismatchError,
    TreeDifference,
)
from penstock.kernel.memory.memory_limit import (
    FREE_BYTES,
    MOST_CODED_EXPANSION,
    MOST_EXPANSION,
    check_available,
    free_memory,
)
from penstock.kernel.messages.restore import Change, ComputedLeaf, Located, RestorePlan
from penstock.kernel.pipeline.run_context import RestoreRun, RunLimits
from penstock.kernel.protocols.layouts import PackedCheckpoint, StorageDetails, StoredCheckpoint, StoredSize
from penstock.kernel.protocols.leaf import LeafInfos, LeafSpec, ParamInfo, StoredLeaf, StoredRows
from penstock.kernel.protocols.leaf_handlers import FilesHandler, LeafHandler, ReadLeaf, ReadLeaves
from penstock.kernel.protocols.reads import SharedRead, Target
from penstock.kernel.protocols.stores import Store
from penstock.stages.planning.casting import DtypeRule, Refit, maker, refit_spec
from penstock.stages.planning.leaf_reads import in_parts, join_memory, plan_reads
from penstock.stages.planning.leaf_sources import (
    ABSENT,
    Input,
    Matching,
    StoredInfos,
    TargetLeaves,
    spec_column,
)
from penstock.stages.planning.matching import match_leaves
from penstock.stages.planning.own_values import NOTHING_OWN, OwnValues, find_own
from penstock.stages.pytree.flattening import StructureCache, flatten_tree, nest, nest_columns

SHOWN_IN_EVENT: Final = 20


def plan_restore(
    run: RestoreRun, located: Located, max_expansion: int = MOST_EXPANSION
) -> tuple[RestorePlan, list[ReadLeaves], list[ReadLeaf]]:
    """Decide what the result is and what to read for it. Blocking; reads no array bytes.

    The index of a leaf that is read is its place in the result. Leaves that only functions need have
    indices above those. Events list the leaves that are not restored as they are stored, one event for
    each kind of change.

    Args:
        run: The restore.
        located: The checkpoint, with the caller's target and options.
        max_expansion: How many times the bytes stored a result without a target may take.

    Returns:
        The plan; packs of small leaves; and all other leaves, with large ones split into parts.

    Raises:
        SpecError: If an option is invalid.
        StructureMismatchError: If the target and the checkpoint differ in a way that no option allows,
            or if an option asks for something impossible. It lists every difference.
        NoHandlerError: If no handler is registered for a type in the target or in the checkpoint.
        HandlerFailedError: If a function given as an option raises.
        ExpansionError: If there is no target, and the result would take too many times the bytes stored.
        InsufficientMemoryError: If the machine has less memory than the result takes.
    """
    checkpoint, request = located.checkpoint, located.request
    options = request.options
    if not request.has_like:
        options.check_no_target()
    target, treedef, own = _flattened(run, located) if request.has_like else (None, None, NOTHING_OWN)
    matching = match_leaves(checkpoint.path, checkpoint.leaves, target, options, own)
    if target is None:
        check_expansion(run.store, checkpoint, matching.rows, max_expansion)

    planner = _Planner(run, located, matching)
    packs, leaves = planner.read_results()
    alone = [leaf.index for leaf in leaves]
    computed = planner.computed_leaves() if matching.functions else []
    leaves += planner.inputs
    if leaves:  # a small tree has packs alone
        leaves = in_parts(run, checkpoint, leaves, mmap=options.mmap)
    # All of them in one error, after everything was compared: they are mended together.
    if matching.differences:  # impossible requests first, then missing leaves, then unexpected ones
        order = {"rule": 0, "missing": 1, "unexpected": 2}
        differences = sorted(matching.differences, key=lambda difference: order.get(difference.kind, 3))
        raise StructureMismatchError(checkpoint.path, differences)
    if leaves and not options.mmap:
        # Neighbours of medium size get one allocation, which can have huge pages.
        join_memory(leaves)

    kept: list[tuple[int, object]] = []
    if ABSENT in matching.rows:
        likes, rows = matching.likes or (), enumerate(matching.rows)
        kept = [(at, likes[at]) for at, row in rows if row == ABSENT and at not in matching.functions]

    unflatten = _unflatten(matching, treedef, has_target=request.has_like)
    changes = tuple(matching.changes)
    plan = RestorePlan(matching.infos, unflatten, checkpoint.directory, kept, computed, changes, alone)
    by_kind: dict[str, list[str]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change.key_path)

    for kind, key_paths in by_kind.items():
        shown = tuple(key_paths[:SHOWN_IN_EVENT])
        run.events.info(f"restore.{kind}", path=run.path, n_leaves=len(key_paths), key_paths=shown)

    return plan, packs, leaves


def _flattened(run: RestoreRun, located: Located) -> tuple[TargetLeaves, Any, OwnValues]:
    """Flatten the target. Return its leaves, its treedef, and what it has of this process for itself.

    Raises:
        StructureMismatchError: If another number of processes saved that, and no function divides it anew.
    """
    checkpoint = located.checkpoint
    infos, values, treedef = StructureCache(run.caches.structures).flatten(located.request.like, run.process)
    if isinstance(infos, LeafInfos):  # as all trees have that have nothing of one process
        return TargetLeaves(infos, values), treedef, NOTHING_OWN

    own = find_own(checkpoint.leaves, located.request.like, infos, run.process)
    if own.differences:
        raise StructureMismatchError(checkpoint.path, own.differences)
    if own.whole:
        found, treedef = flatten_tree(located.request.like, "", run.process, own.whole)
        infos, values = [leaf.info for leaf in found], [leaf.value for leaf in found]

    return TargetLeaves(infos, values), treedef, own


@final
class _Planner:
    """Plans the reads of one restore, and records differences and changes."""

    def __init__(self, run: RestoreRun, located: Located, matching: Matching) -> None:
        options = located.request.options
        self.inputs: list[ReadLeaf] = []  # read only as inputs of functions
        self._run = run
        self._checkpoint = located.checkpoint
        self._mmap = options.mmap
        self._options = options
        self._matching = matching
        self._input_indices: dict[object, int] = {}
        self._result = ResultBytes(located.checkpoint.path)

    def read_results(self) -> tuple[list[ReadLeaves], list[ReadLeaf]]:
        """Plan the leaves of the result that are read."""
        rows, likes = self._matching.rows, self._matching.likes
        places: Sequence[int] = range(len(rows))
        if ABSENT in rows:
            places = [place for place, row in enumerate(rows) if row != ABSENT]
            rows = [rows[place] for place in places]
            likes = None if likes is None else [likes[place] for place in places]

        stored = spec_column(self._checkpoint.leaves)
        specs = [stored[row] for row in rows]
        handlers = self._handlers(rows, specs, likes)
        if self._options.dtype is not None or not self._options.strict:
            self._find_changed(places, rows, handlers, likes)

        targets = self._targets(places, rows, specs, handlers, likes)
        positions = places if isinstance(places, range) else {place: at for at, place in enumerate(places)}

        def make(place: int) -> ReadLeaf:
            at = positions[place]
            return self._read(place, self._checkpoint.leaves[rows[at]], handlers[at], targets[at])

        wanted = ResultLeaves(places, rows, specs, handlers, targets)
        packs, others = make_packs(self._checkpoint, wanted, self._run.limits, make, mmap=self._mmap)
        self._result.add("", sum([pack.nbytes for pack in packs]))

        return packs, [make(place) for place in others]

    def _targets(
        self,
        places: Sequence[int],
        rows: Sequence[int],
        specs: Sequence[LeafSpec],
        handlers: Sequence[LeafHandler],
        likes: Sequence[Any] | None,
    ) -> list[Target]:
        """Ask each handler for the targets of its leaves, and record what differs."""
        by_handler: dict[int, list[int]] = {}  # by identity: they need not be hashable
        for at, handler in enumerate(handlers):
            by_handler.setdefault(id(handler), []).append(at)

        targets = [_NO_TARGET] * len(rows)
        differences: dict[int, TreeDifference] = {}
        for numbers in by_handler.values():
            chosen = StoredRows(self._checkpoint.leaves, _chosen(rows, numbers), _chosen(specs, numbers))
            some = None if likes is None else _chosen(likes, numbers)
            found = handlers[numbers[0]].targets(chosen, some)
            for at, target in zip(numbers, found, strict=True):
                if isinstance(target, TreeDifference):
                    differences[at] = target
                else:
                    targets[at] = target

        for at in sorted(differences):
            stored, info = self._checkpoint.leaves[rows[at]], self._matching.infos[places[at]]
            self._differs(differences[at], stored, info)

        return targets

    def computed_leaves(self) -> list[ComputedLeaf]:
        """Plan the inputs of functions, and return the leaves that they make."""
        functions = self._matching.functions
        needed = {
            place: tuple([self._input(each) for each in function.inputs])
            for place, function in functions.items()
        }
        users = Counter([index for inputs in needed.values() for index in inputs])
        infos, likes = self._matching.infos, self._matching.likes or ()
        computed: list[ComputedLeaf] = []
        for place, inputs in needed.items():
            is_shared = [users[index] > 1 for index in inputs]
            make = maker(functions[place], infos[place], likes[place], is_shared)
            computed.append(ComputedLeaf(place, inputs, make))

        return computed

    def _find_changed(
        self,
        places: Sequence[int],
        rows: Sequence[int],
        handlers: list[LeafHandler],
        likes: Sequence[Any] | None,
    ) -> None:
        """Find the leaves whose dtype or shape is to change, record each, and wrap its handler."""
        rule = DtypeRule(self._options.dtype)
        infos, changes = self._matching.infos, self._matching.changes
        refits: dict[tuple[int, LeafSpec], Refit] = {}
        for at, place in enumerate(places):
            stored, info = self._checkpoint.leaves[rows[at]], infos[place]
            like = None if likes is None else likes[at]
            spec = refit_spec(stored, info, like, self._options, rule)
            if isinstance(spec, TreeDifference):
                self._differs(spec, stored, info)
                continue
            if spec is stored.spec:
                continue
            handler = handlers[at]
            if isinstance(handler, FilesHandler):
                raise _not_changed(info.key_path, handler.name)

            handlers[at] = refits.setdefault((id(handler), spec), Refit(handler, spec))
            if spec.dtype != stored.spec.dtype:
                changes.append(Change("cast", info.key_path, stored.spec.dtype, spec.dtype))
            if spec.shape != stored.spec.shape:
                changes.append(Change("resized", info.key_path, str(stored.spec.shape), str(spec.shape)))

        changes += [Change("unused", pattern) for pattern in rule.unused]

    def _input(self, wanted: Input) -> int:
        """Plan the read of a function's input. Functions share one read for the same leaf and `like`."""
        like = wanted.like
        same: object = like if isinstance(like, type | jax.ShapeDtypeStruct) else id(like)
        key = (wanted.stored.info.keys, wanted.has_like, same)
        if key not in self._input_indices:
            index = self._input_indices[key] = len(self._matching.rows) + len(self._input_indices)
            kind: type | str = wanted.stored.spec.typestr
            if wanted.has_like:
                kind = like if isinstance(like, type) else type(like)

            stored, handler = wanted.stored, self._handler(kind, wanted.stored)
            row = StoredRows([stored], [0], [stored.spec])
            (target,) = handler.targets(row, [like] if wanted.has_like else None)
            if isinstance(target, TreeDifference):
                self._differs(target, stored, None)
                target = _NO_TARGET

            self.inputs.append(self._read(index, stored, handler, target))

        return self._input_indices[key]

    def _read(self, index: int, stored: StoredLeaf, handler: LeafHandler, target: Target) -> ReadLeaf:
        """Plan the reads of a stored leaf."""
        target = target.fresh()
        if not self._mmap:  # else it is known only later what is in the page cache
            self._result.add_target(stored.info.key_path, target)

        piece_bytes = self._run.limits.piece_bytes
        reads = plan_reads(self._checkpoint, index, stored, target, piece_bytes)
        largest = max([read.scratch_nbytes for read in reads], default=0)  # a buffer, such as for a chunk
        check_available(self._checkpoint.path, largest, stored.info.key_path)
        return ReadLeaf(index, stored, handler, target, reads)

    def _handlers(
        self, rows: Sequence[int], specs: Sequence[LeafSpec], likes: Sequence[Any] | None
    ) -> list[LeafHandler]:
        """Find the handler of each leaf: by its type in the target, or by its stored type without one."""
        leaves = self._checkpoint.leaves
        known: dict[type | str, LeafHandler] = {}
        handlers: list[LeafHandler] = []
        for at, row in enumerate(rows):
            kind: type | str = specs[at].typestr
            if likes is not None:  # a leaf of the target may be a type itself
                like = likes[at]
                kind = like if isinstance(like, type) else type(like)  # pyright: ignore[reportUnknownVariableType]  # anybody's
                if specs[at].typestr == "scalar" and self._options.dtype is None and _is_number(like):
                    kind = "scalar"

            handler = known.get(kind)
            if handler is None:
                handler = known[kind] = self._handler(kind, leaves[row])

            handlers.append(handler)

        return handlers

    def _handler(self, kind: type | str, first: StoredLeaf) -> LeafHandler:
        """Find the handler for a type in the target, or for a stored type name."""
        registry, key_path = self._run.registry, first.info.key_path
        if isinstance(kind, str):
            return registry.for_typestr(kind, key_path)

        return registry.lookup(kind, key_path)

    def _differs(self, difference: TreeDifference, stored: StoredLeaf, info: ParamInfo | None) -> None:
        """Record a difference at its place in the result; add the stored place if it is another one."""
        key_path = stored.info.key_path if info is None else info.key_path
        on_disk = difference.on_disk
        if key_path != stored.info.key_path:
            on_disk = f"{on_disk} (as {stored.info.key_path})"

        self._matching.differences.append(replace(difference, key_path=key_path, on_disk=on_disk))


def _not_changed(key_path: str, handler: str) -> SpecError:
    """Make the error of a leaf that only its own handler reads, and that an option would change."""
    problem = f"is read by {handler} as a whole, and so cannot be cast or resized by dtype or strict=False"
    error = SpecError(f"{key_path} {problem}; leave it out of `dtype`, and change the value that is returned")
    error.key_path = key_path
    return error


def _unflatten(matching: Matching, treedef: Any, *, has_target: bool) -> Callable[[Sequence[object]], object]:
    """Return the function that builds a tree from the values of a result."""
    infos = matching.infos
    if has_target:
        return partial(cast("Any", tree_util).tree_unflatten, treedef)
    if isinstance(infos, StoredInfos):
        return partial(nest_columns, *infos.key_columns())

    return partial(nest, infos)


T = TypeVar("T")

SMALL: Final = 64 * 1024
"""Bytes of a chunk. Leaves of larger chunks gain nothing by travelling together."""

MOST: Final = 16 * SMALL
"""Bytes of a leaf in several chunks. To bring them together costs a copy, and to read each alone a call."""

FEW: Final = 16
"""Where there are more files, leaves of one go together from so many on. Fewer are not worth a message and a
trip to a thread, which leaves of many files can share."""

MAPPED_ALONE: Final = 4096
"""Bytes of a leaf that is mapped by itself. Smaller ones share pages, and jax copies such memory."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class ResultLeaves:
    """The leaves of a result that are read, in columns of one length."""

    places: Sequence[int]  #: places in the result, in order
    rows: Sequence[int]  #: places in the checkpoint's leaves
    specs: Sequence[LeafSpec]
    handlers: Sequence[LeafHandler]
    targets: Sequence[Target]


_NO_TARGET: Final = Target()
"""Of a leaf that differs: it is planned on, so that all differences are found, and never read."""


def make_packs(
    checkpoint: StoredCheckpoint,
    wanted: ResultLeaves,
    limits: RunLimits,
    make: Callable[[int], ReadLeaf],
    *,
    mmap: bool = False,
) -> tuple[list[ReadLeaves], Sequence[int]]:
    """Group small leaves that are in the same file: one read brings all of them.

    Args:
        checkpoint: The checkpoint that stores them.
        wanted: All leaves that are read.
        limits: How many leaves and bytes a pack may have.
        make: Makes the leaf at a place of the result. Called only if a stage looks at single leaves.
        mmap: Whether their files are mapped: only leaves go together then that are whole there.

    Returns:
        The packs, and the places of all other leaves.
    """
    if not isinstance(checkpoint, PackedCheckpoint):
        return [], wanted.places

    leaves = checkpoint.leaves
    row_of: Callable[[int], int] = wanted.rows.__getitem__
    if not isinstance(wanted.places, range):
        row_of = dict(zip(wanted.places, wanted.rows, strict=True)).__getitem__

    def info(place: int) -> ParamInfo:
        return leaves[row_of(place)].info

    small: dict[int, int] = {}  # bytes of the leaves that are small enough, by the identity of their spec
    for number, spec in {id(spec): spec for spec in wanted.specs}.items():  # usually few
        if mmap and (spec.nbytes >= MAPPED_ALONE or spec.n_chunks != 1):
            continue
        if spec.shape is not None and spec.chunk_nbytes <= SMALL and spec.nbytes <= MOST:
            small[number] = spec.nbytes

    fits = [
        at
        for at, (spec, target) in enumerate(zip(wanted.specs, wanted.targets, strict=True))
        if target.packable and id(spec) in small
    ]
    chunks = checkpoint.whole_chunks(_chosen(wanted.rows, fits))
    together: dict[int, list[int]] = {}  # by file, of which there may be as many as leaves: numbers in `fits`
    for number, file in enumerate(chunks.ids):
        if file >= 0:
            together.setdefault(file, []).append(number)

    others = set(wanted.places)
    packs: list[ReadLeaves] = []
    made: dict[int, ReadLeaf] = {}
    for file, numbers in together.items():
        if len(numbers) < FEW < len(together):
            continue

        chosen = _chosen(fits, numbers)
        specs, indices = _chosen(wanted.specs, chosen), _chosen(wanted.places, chosen)
        shared = SharedRead(
            leaves=indices,
            file=chunks.files[file],
            specs=specs,
            offsets=_chosen(chunks.offsets, numbers),
            sizes=list(map(small.__getitem__, map(id, specs))),
            crc32cs=_chosen(chunks.crc32cs, numbers),
        )
        pack = ReadLeaves(
            indices=indices,
            handlers=_chosen(wanted.handlers, chosen),
            specs=specs,
            details=[wanted.targets[at].detail for at in chosen],
            info=info,
            make=make,
            made=made,
            shared=shared,
        )
        others.difference_update(indices)
        for start, stop in cuts(shared.sizes, limits.batch_bytes, limits.batch_leaves):
            packs.append(pack.part(range(start, stop)))

    return packs, sorted(others)


def _chosen(column: Sequence[T], numbers: Sequence[int]) -> Sequence[T]:
    return column if len(numbers) == len(column) else [column[at] for at in numbers]


def check_expansion(store: Store, checkpoint: StoredCheckpoint, rows: Sequence[int], most: int) -> None:
    """Refuse leaves that claim far more bytes than the whole checkpoint has. Blocking.

    Chunks that were never written and holes in files cost who made them nothing. What a codec made small is
    there, and may be as much as the codec can have made of it.

    Args:
        store: Where it is.
        checkpoint: Which checkpoint.
        rows: Places of the leaves to read.
        most: How many times the bytes stored they may take; if it is less than by default, with a codec, too.

    Raises:
        ExpansionError: Names the largest leaf.
    """
    specs = spec_column(checkpoint.leaves)
    chosen = [specs[row] for row in rows]
    known = {id(spec): spec.claimed_nbytes for spec in {id(spec): spec for spec in chosen}.values()}
    claimed = sum([known[id(spec)] for spec in chosen])
    if claimed <= FREE_BYTES or not isinstance(checkpoint, StoredSize):
        return

    stored = checkpoint.stored_bytes(store)
    if claimed > most * stored:
        if most >= MOST_EXPANSION and isinstance(checkpoint, StorageDetails):
            coded = sum(
                min(specs[row].claimed_nbytes, MOST_CODED_EXPANSION * checkpoint.stored_nbytes(row))
                for row in rows
                if checkpoint.codec(row) is not None
            )
            if claimed - min(coded, MOST_CODED_EXPANSION * stored) <= most * stored:
                return

        largest = max(rows, key=lambda row: specs[row].claimed_nbytes)
        key_path = checkpoint.leaves[largest].info.key_path
        raise ExpansionError(checkpoint.path, stored, claimed, most, key_path)


@final
class ResultBytes:
    """Adds up the host memory that a result will take, and compares it with the available memory.

    Args:
        path: The checkpoint, for the error.
    """

    __slots__ = ("_free", "_on_host", "_path", "_total")

    def __init__(self, path: str) -> None:
        self._path = path
        self._total = 0
        self._free: int | None = None
        self._on_host: bool | None = None

    def add_target(self, key_path: str, target: Target) -> None:
        """Count the regions of a leaf, unless their bytes only pass through the host."""
        nbytes = sum([region.nbytes for region in target.regions])
        if target.staging_bytes and nbytes > FREE_BYTES:
            if self._on_host is None:
                self._on_host = jax.default_backend() == "cpu"
            if not self._on_host:
                return

        self.add(key_path, nbytes)

    def add(self, key_path: str, nbytes: int) -> None:
        """Count bytes that will be held.

        Raises:
            InsufficientMemoryError: If all that were counted are more than there are.
        """
        self._total += nbytes
        if self._total <= FREE_BYTES:
            return
        if self._free is None:
            self._free = free_memory()
        if self._total > self._free:
            raise InsufficientMemoryError(self._path, self._total, self._free, key_path)


def _is_number(like: Any) -> bool:
    """Return whether a leaf of a target is what `jax.eval_shape` makes of a Python number."""
    return (
        isinstance(like, jax.ShapeDtypeStruct) and like.weak_type and like.shape == () and not like.sharding
    )
