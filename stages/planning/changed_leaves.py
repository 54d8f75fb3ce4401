"""Plans a restore whose result departs from what is stored: renamed, made, cast, cut, partial."""

from __future__ import annotations

__all__ = ("plan_onto",)

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast, final

import jax
import numpy as np
from jax import tree_util

from penstock.kernel.errors import StructureMismatchError, TreeDifference
from penstock.kernel.messages.restore import Located, Making, ReadLeaf, RestorePlan
from penstock.kernel.messages.restore_options import Change, RestoreOptions
from penstock.kernel.pipeline.run_context import RestoreRun
from penstock.kernel.protocols.leaf import ParamInfo, StoredLeaf
from penstock.kernel.protocols.leaf_handlers import LeafHandler
from penstock.kernel.protocols.reads import Target
from penstock.stages.planning.casting import DtypeRule, Refit, refit_spec
from penstock.stages.planning.coalescing import join_reads
from penstock.stages.planning.leaf_sources import Function, Input, Matching, Origin, call_foreign
from penstock.stages.planning.renaming import MatchLeaves, match_renamed
from penstock.stages.planning.transforms import match_transforms
from penstock.stages.planning.value_conversion import conformed
from penstock.stages.pytree.flattening import FlatLeaf, flatten_tree, nest

SHOWN_IN_EVENT = 20


def plan_onto(
    run: RestoreRun, located: Located, options: RestoreOptions, match: MatchLeaves
) -> tuple[RestorePlan, list[ReadLeaf]]:
    """Decide what to read for a result that departs from what is stored. Blocking; reads no array bytes.

    Tells the changes by events. A leaf of the result
    that is read has its own index; what functions need is read under indices beyond those.

    Args:
        run: The restore.
        located: The checkpoint and the target.
        options: What was asked for.
        match: Pairs the leaves of a target with stored ones that have the same keys.

    Raises:
        SpecError: If an option does not fit.
        StructureMismatchError: If the target and the checkpoint differ in what was not asked for, or
            something that was cannot be done; it lists every difference.
        NoHandlerError: If nobody handles a type, wanted or stored.
        HandlerFailedError: If a function given as an option raises.
    """
    options.check_target(has_like=located.has_like)
    flat: list[FlatLeaf] | None = None
    treedef: Any = None
    if located.has_like:
        flat, treedef = flatten_tree(located.like)

    stored_leaves = located.checkpoint.leaves
    if options.transforms is not None and flat is not None:
        matching = match_transforms(flat, stored_leaves, options)
    else:
        matching = match_renamed(flat, stored_leaves, options, match)

    planner = _Planner(run, located, options, matching)
    for index, origin in enumerate(matching.origins):
        planner.plan(index, origin)

    matching.changes += [Change("unused", pattern) for pattern in planner.dtype_rule.unused]
    if matching.differences:
        raise StructureMismatchError(located.checkpoint.path, _in_order(matching.differences))

    infos = [origin.info for origin in matching.origins]
    unflatten = partial(cast("Any", tree_util).tree_unflatten, treedef)
    plan = RestorePlan(
        infos,
        unflatten if located.has_like else partial(nest, infos),
        located.checkpoint.directory,
        planner.kept,
        planner.makings(),
        tuple(matching.changes),
    )
    _tell(run, plan.changes)
    return plan, planner.leaves


@final
class _Planner:
    """Collects what is to be read, and what is to be made of it."""

    def __init__(
        self, run: RestoreRun, located: Located, options: RestoreOptions, matching: Matching
    ) -> None:
        self.leaves: list[ReadLeaf] = []
        self.kept: list[tuple[int, object]] = []
        self._run = run
        self._checkpoint = located.checkpoint
        self._options = options
        self.dtype_rule = DtypeRule(options.dtype)
        self._matching = matching
        self._refits: dict[int, Refit] = {}
        self._made: list[tuple[int, Origin, tuple[int, ...]]] = []
        self._sources: dict[object, int] = {}
        self._users: Counter[int] = Counter()

    def plan(self, index: int, origin: Origin) -> None:
        """Plan one leaf of the result."""
        if origin.read is not None:
            self._read(index, Input(origin.read, origin.like, origin.has_like), origin.info)
        elif origin.function is not None:
            inputs = tuple(self._input(each) for each in origin.function.inputs)
            self._users.update(inputs)
            self._made.append((index, origin, inputs))
        else:
            self.kept.append((index, origin.like))

    def makings(self) -> list[Making]:
        """Return how to make what functions make; once every leaf is planned."""
        return [
            Making(index, inputs, _maker(origin, [self._users[at] > 1 for at in inputs]))
            for index, origin, inputs in self._made
        ]

    def _input(self, wanted: Input) -> int:
        """Have a leaf read for a function, once for all functions that want it alike."""
        like = wanted.like
        same: object = like if isinstance(like, type | jax.ShapeDtypeStruct) else id(like)
        key = (wanted.stored.info.keys, wanted.has_like, same)
        if key not in self._sources:
            index = self._sources[key] = len(self._matching.origins) + len(self._sources)
            self._read(index, wanted, None)

        return self._sources[key]

    def _read(self, index: int, wanted: Input, info: ParamInfo | None) -> None:
        """Plan the reads of a stored leaf; `info` is its place in the result, if it has one."""
        stored = wanted.stored
        handler = self._handler_for(wanted)
        chosen, target = self._target(handler, wanted, info)
        if isinstance(target, TreeDifference):
            self._differs(target, stored, info)
            return

        piece_bytes = self._run.limits.piece_bytes
        reads = tuple(
            read
            for region in target.regions
            for read in self._checkpoint.reads(index, stored, region, piece_bytes)
        )
        self.leaves.append(ReadLeaf(index, stored, chosen, target, join_reads(reads, piece_bytes)))

    def _target(
        self, handler: LeafHandler, wanted: Input, info: ParamInfo | None
    ) -> tuple[LeafHandler, Target | TreeDifference]:
        stored, like, has_like = wanted.stored, wanted.like, wanted.has_like
        # What functions get is as it is stored: they cast and cut as they like.
        spec = (
            stored.spec
            if info is None
            else refit_spec(stored, info, like if has_like else None, self._options, self.dtype_rule)
        )
        if isinstance(spec, TreeDifference):
            return handler, spec
        if spec is stored.spec or info is None:
            return handler, handler.target(stored, like, has_like)

        refit = self._refits.setdefault(id(handler), Refit(handler))
        before, changes = stored.spec, self._matching.changes
        if spec.dtype != before.dtype:
            changes.append(Change("cast", info.key_path, before.dtype, spec.dtype))
        if spec.shape != before.shape:
            changes.append(Change("resized", info.key_path, str(before.shape), str(spec.shape)))

        return refit, refit.refit(stored, spec, like, has_like)

    def _handler_for(self, wanted: Input) -> LeafHandler:
        key_path = wanted.stored.info.key_path
        if not wanted.has_like:
            return self._run.registry.for_typestr(wanted.stored.spec.typestr, key_path)

        type_ = wanted.like if isinstance(wanted.like, type) else type(wanted.like)
        return self._run.registry.lookup(type_, key_path)

    def _differs(self, difference: TreeDifference, stored: StoredLeaf, info: ParamInfo | None) -> None:
        """Tell a difference where it is in the result, and where it is stored if that is elsewhere."""
        key_path = stored.info.key_path if info is None else info.key_path
        on_disk = difference.on_disk
        if key_path != stored.info.key_path:
            on_disk = f"{on_disk} (as {stored.info.key_path})"

        self._matching.differences.append(replace(difference, key_path=key_path, on_disk=on_disk))


def _maker(origin: Origin, shared: Sequence[bool]) -> Callable[[Sequence[Any]], object]:
    function = cast("Function", origin.function)
    key_path = origin.info.key_path

    def make(values: Sequence[Any]) -> object:
        for value, others_use_it in zip(values, shared, strict=True):
            if others_use_it and isinstance(value, np.ndarray):
                value.flags.writeable = False

        made: Any = conformed(
            call_foreign(function.call, function.name, key_path, values), origin.like, key_path
        )
        # A part of a buffer would keep all of it alive, and one of a shared buffer would change with others.
        sole = len(values) == 1 and made is values[0] and not shared[0]
        return made if sole or not _is_part(made, values) else made.copy()

    return make


def _is_part(made: Any, values: Sequence[Any]) -> bool:
    """Whether an array on the host may lie in the memory of another one."""
    if not isinstance(made, np.ndarray):
        return False

    arrays: list[Any] = [value for value in values if isinstance(value, np.ndarray)]
    return any(np.may_share_memory(cast("Any", made), array) for array in arrays)


def _in_order(differences: Sequence[TreeDifference]) -> list[TreeDifference]:
    """What cannot be done at all, then missing, then unexpected leaves, then those that differ."""
    order = {"rule": 0, "missing": 1, "unexpected": 2}
    return sorted(differences, key=lambda difference: order.get(difference.kind, 3))


def _tell(run: RestoreRun, changes: Sequence[Change]) -> None:
    by_kind: dict[str, list[str]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change.key_path)

    for kind, key_paths in by_kind.items():
        shown = tuple(key_paths[:SHOWN_IN_EVENT])
        run.events.info(f"restore.{kind}", path=run.path, n_leaves=len(key_paths), key_paths=shown)
