"""Groups leaves into messages, and compares what arrives with the plan: nothing else is ever published.

A batch carries the plan (`plan_of`). A leaf must be stored as planned (`check_planned`), and all bytes must
be there at the end (`arrived_leaves`).
"""

from __future__ import annotations

__all__ = (
    "adjacent",
    "arrived_bytes",
    "arrived_leaves",
    "batched",
    "batched_columns",
    "check_all_there",
    "check_planned",
    "check_planned_together",
    "described",
    "encoding_room",
    "grouped",
    "infos_of",
    "part_of",
    "plan_of",
    "require_plan",
)

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from penstock.kernel.codecs import AUTO
from penstock.kernel.concurrency.brief_steps import as_slice, cuts
from penstock.kernel.errors import ChangedLeafError, IncompletePipelineError, PipelineError
from penstock.kernel.messages.restore import PlannedBatch, RestorePlan
from penstock.kernel.messages.save import Leaf, LeafBatch, Leaves, SavePlan, WrittenBatch, in_columns
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import FilesHandler, ReadLeaf, ReadLeaves

if TYPE_CHECKING:
    from penstock.kernel.pipeline.run_context import RunLimits


class _HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


L = TypeVar("L", Leaf, ReadLeaf)
W = TypeVar("W", bound=_HasBytes)
T = TypeVar("T")


def batched(
    leaves: list[ReadLeaf], limits: RunLimits, *, plan: RestorePlan | None = None
) -> Iterator[PlannedBatch]:
    """Yield the leaves in order, grouped within the limits; a leaf above `batch_bytes` goes alone.

    All leaves of a handler that keeps its own files are one batch, which comes before the others.
    The list is emptied as it goes, so that leaves already passed on are not kept alive.
    """
    for handler, owned in _owned(leaves):
        yield PlannedBatch(owned, plan=plan, handler=handler)

    leaves.reverse()
    while leaves:
        batch = [leaves.pop()]
        nbytes = batch[0].nbytes
        while leaves and len(batch) < limits.batch_leaves:
            nbytes += leaves[-1].nbytes
            if nbytes > limits.batch_bytes:
                break

            batch.append(leaves.pop())

        message = PlannedBatch(ReadLeaves.of(batch), plan=plan)
        del batch
        yield message
        del message


def batched_columns(
    leaves: Leaves, limits: RunLimits, *, plan: SavePlan | None = None
) -> Iterator[LeafBatch]:
    """Do what `batched` does with leaves in columns. Their values are taken out as it goes."""
    handlers = leaves.handlers
    owners = {
        number: each
        for number, each in {id(each): each for each in handlers}.items()
        if isinstance(each, FilesHandler)
    }
    if owners:
        is_owned = [id(each) in owners for each in handlers]
        owned = list(leaves.part([at for at, is_one in enumerate(is_owned) if is_one]))
        rest = leaves.part([at for at, is_one in enumerate(is_owned) if not is_one])
        leaves.take(0, len(leaves))  # these columns hold no value any more
        leaves = rest
        for handler, group in _owned(owned):
            yield LeafBatch(group, plan=plan, handler=handler)

    for start, stop in cuts(leaves.sizes, limits.batch_bytes, limits.batch_leaves):
        batch = LeafBatch(leaves.take(start, stop), False, plan)
        yield batch
        del batch


def infos_of(leaves: Sequence[Leaf] | Sequence[ReadLeaf]) -> Iterator[ParamInfo]:
    """Yield where the leaves of a batch stand, without making those that are in columns."""
    if isinstance(leaves, ReadLeaves):
        return map(leaves.info, leaves.indices)

    return (leaf.info for leaf in leaves)


def part_of(leaves: Sequence[T], numbers: Sequence[int]) -> Sequence[T]:
    """Return some leaves of a batch, by number; in columns if they are."""
    if isinstance(leaves, Leaves | ReadLeaves):
        return cast("Sequence[T]", leaves.part(numbers))

    return tuple([leaves[number] for number in numbers])


def _owned(leaves: list[L]) -> Iterator[tuple[FilesHandler, tuple[L, ...]]]:
    """Remove the leaves whose handlers keep files of their own from the list; yield them by handler."""
    # Keyed by identity: handlers need not be hashable.
    handlers = {id(leaf.handler): leaf.handler for leaf in leaves}
    owners = {number: each for number, each in handlers.items() if isinstance(each, FilesHandler)}
    if not owners:
        return

    found: dict[int, tuple[FilesHandler, list[L]]] = {}
    rest: list[L] = []
    for leaf in leaves:
        owner = owners.get(id(leaf.handler))
        if owner is None:
            rest.append(leaf)
        else:
            found.setdefault(id(owner.inner), (owner, []))[1].append(leaf)

    leaves[:] = rest
    del rest
    for number in list(found):
        handler, owned = found.pop(number)
        yield handler, tuple(owned)


def grouped(
    items: Iterable[W], most: int, weigh: Callable[[W], int] | None = None
) -> Iterator[tuple[W, ...]]:
    """Yield the items in order, in groups that weigh at most `most` bytes.

    An item that weighs more is yielded alone. Without `weigh` an item weighs its `nbytes`.
    """
    group: list[W] = []
    nbytes = 0
    for item in items:
        weight = item.nbytes if weigh is None else weigh(item)
        if group and nbytes + weight > most:
            yield tuple(group)
            group, nbytes = [], 0

        group.append(item)
        nbytes += weight

    if group:
        yield tuple(group)


def adjacent(items: Iterable[T], follows: Callable[[T, T], bool]) -> Iterator[list[T]]:
    """Yield the items in order, in runs in which each follows the one before it.

    Args:
        items: Reads or writes, in order of their offsets.
        follows: Says of an item and the one after it whether one call may serve both.
    """
    run: list[T] = []
    for item in items:
        if run and not follows(run[-1], item):
            yield run
            run = []

        run.append(item)

    if run:
        yield run


def require_plan(plan: RestorePlan | None) -> RestorePlan:
    """Return the plan that the batches brought.

    Raises:
        PipelineError: If none of them did.
    """
    if plan is None:
        raise PipelineError(
            "no batch brought the plan of the restore; a stage that makes new batches must pass on"
            " the `plan` of those it takes"
        )

    return plan


class _Planned(Protocol):
    @property
    def plan(self) -> SavePlan | None: ...


def plan_of(batches: Iterable[_Planned]) -> SavePlan:
    """Return the plan of a save, which every batch carries.

    Raises:
        PipelineError: If no batch has it: a stage made new batches without it.
    """
    for batch in batches:
        if batch.plan is not None:
            return batch.plan

    raise PipelineError("no batch has the plan of the save; make new batches from old ones with `replace`")


def check_planned(leaf: Leaf, plan: SavePlan) -> None:
    """Refuse a leaf that differs from its plan, which decides its metadata and its place.

    Raises:
        ChangedLeafError: If a stage changed it without declaring that.
    """
    planned = plan.specs[leaf.index]
    if leaf.spec is not planned and not same_spec(leaf.spec, planned):
        raise ChangedLeafError(leaf.info.key_path, described(planned), described(leaf.spec))


def check_planned_together(leaves: Leaves, plan: SavePlan) -> None:
    """Do what `check_planned` does for many leaves. Most are the very objects of the plan."""
    span, planned = as_slice(leaves.indices), plan.specs
    if span is not None and all(map(is_, leaves.specs, planned[span])):
        return

    for number, (index, spec) in enumerate(zip(leaves.indices, leaves.specs, strict=True)):
        if spec is not planned[index]:
            check_planned(leaves[number], plan)


def same_spec(spec: LeafSpec, planned: LeafSpec) -> bool:
    """Return whether a leaf is stored as planned; a codec that was `auto` is decided on the way."""
    if planned.codec == AUTO and spec.codec != AUTO:
        spec = replace(spec, codec=AUTO)

    return spec == planned


def described(spec: LeafSpec) -> str:
    """Describe briefly how a leaf is stored."""
    shape = "" if spec.shape is None else f"{spec.dtype}{list(spec.shape)}, {spec.nbytes} bytes"
    chunks = "" if spec.chunk_shape == spec.shape else f" in chunks of {list(spec.chunk_shape)}"
    return f"{shape or spec.typestr}{chunks}" + (f", {spec.codec}" if spec.codec else "")


def encoding_room(nbytes: int) -> int:
    """Upper bound for the encoded length of a chunk of `nbytes`, for noise and any codec of penstock."""
    return nbytes + nbytes // 128 + 1024


def arrived_leaves(plan: SavePlan, batches: Sequence[WrittenBatch]) -> Leaves:
    """Compare the plan with what arrived, specs included, and return all leaves in order.

    If several processes save together, that is what this one writes of them.

    Raises:
        ChangedLeafError: If a leaf differs from its plan.
        IncompletePipelineError: If a leaf or part of one is missing or came twice.
    """
    n_leaves = len(plan.infos)
    counts = np.zeros(n_leaves, np.int64)
    changed: dict[int, LeafSpec] = {}
    for batch in batches:
        part = in_columns(batch.leaves)
        np.add.at(counts, np.array(part.indices, np.int64), 1)
        for number, (index, spec) in enumerate(zip(part.indices, part.specs, strict=True)):
            if spec is not plan.specs[index]:  # the very object, mostly
                check_planned(part[number], plan)
                changed[index] = spec

    # The very list of the plan, if it can be, because documents are recognised by it.
    specs = plan.specs
    if changed:
        specs = [changed.get(index, spec) for index, spec in enumerate(specs)]

    here = np.ones(n_leaves, np.int64)
    wanted = np.array(plan.sizes, np.int64)
    if plan.joint is not None:
        here = (wanted > 0).astype(np.int64)
        here[list(plan.joint.handled)] = 1

    _check_complete(plan, (counts == here) & (arrived_bytes(specs, batches) == wanted))

    return Leaves(range(n_leaves), specs, None, plan.infos, plan.handlers)


def check_all_there(plan: SavePlan, specs: Sequence[LeafSpec], batches: Sequence[WrittenBatch]) -> None:
    """Check that all processes together wrote every leaf whole.

    Raises:
        IncompletePipelineError: If a leaf or part of one is missing or came twice.
    """
    wanted = np.array([spec.nbytes for spec in specs], np.int64)
    _check_complete(plan, arrived_bytes(specs, batches) == wanted)


def _check_complete(plan: SavePlan, complete: npt.NDArray[np.bool_]) -> None:
    if not complete.all():
        absent = plan.infos[int(np.argmin(complete))]
        raise IncompletePipelineError(len(complete), int(complete.sum()), absent.key_path)


def arrived_bytes(specs: Sequence[LeafSpec], batches: Sequence[WrittenBatch]) -> npt.NDArray[np.int64]:
    """Sum up the bytes of each leaf that were written."""
    arrived = np.zeros(len(specs), np.int64)
    coded: dict[tuple[int, tuple[int, ...]], int] = {}
    for batch in batches:
        table = batch.written
        leaf, nbytes, is_plain = np.asarray(table.leaf), np.asarray(table.nbytes), np.asarray(table.coded) < 0
        np.add.at(arrived, leaf[is_plain], nbytes[is_plain])
        for part in table.rows(np.flatnonzero(~is_plain)):
            chunk = (part.leaf, part.chunk)
            coded[chunk] = coded.get(chunk, part.coded or 0) - part.nbytes

    # An encoded chunk counts with its original length, once all of its encoded bytes have arrived.
    for (index, _), absent_bytes in coded.items():
        if absent_bytes == 0:
            arrived[index] += specs[index].chunk_nbytes

    return arrived
