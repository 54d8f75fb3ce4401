"""Groups leaves into messages, and pieces and reads into units in flight."""

from __future__ import annotations

__all__ = ("adjacent", "batched", "batched_columns", "cuts", "grouped", "infos_of", "part_of", "require_plan")

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from penstock.kernel.errors import PipelineError
from penstock.kernel.messages.leaves import Leaf, Leaves
from penstock.kernel.messages.restore import RestorePlan
from penstock.kernel.messages.save import Batchable, LeafBatch
from penstock.kernel.protocols.files_handler import FilesHandler
from penstock.kernel.protocols.leaf import ParamInfo
from penstock.kernel.protocols.leaf_handlers import ReadLeaf, ReadLeaves

if TYPE_CHECKING:
    from penstock.kernel.pipeline.run_context import RunLimits


class _Weighs(Protocol):
    @property
    def nbytes(self) -> int: ...


L = TypeVar("L", bound=Batchable)
W = TypeVar("W", bound=_Weighs)
T = TypeVar("T")


def batched(leaves: list[ReadLeaf], limits: RunLimits, *, plan: Any = None) -> Iterator[LeafBatch[ReadLeaf]]:
    """Yield the leaves in order, grouped within the limits; a leaf above `batch_bytes` goes alone.

    All leaves of a handler that keeps files of its own are one batch, which comes before the others.
    The list is emptied as it goes, so that leaves already passed on are not kept alive.
    """
    yield from _owned(leaves, plan)
    leaves.reverse()
    while leaves:
        batch = [leaves.pop()]
        nbytes = batch[0].nbytes
        while leaves and len(batch) < limits.batch_leaves:
            nbytes += leaves[-1].nbytes
            if nbytes > limits.batch_bytes:
                break

            batch.append(leaves.pop())

        message: LeafBatch[ReadLeaf] = LeafBatch(ReadLeaves.of(batch), plan=plan)
        del batch
        yield message
        del message


def batched_columns(leaves: Leaves, limits: RunLimits, *, plan: Any = None) -> Iterator[LeafBatch[Leaf]]:
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
        leaves.take(0, len(leaves))  # whoever holds these columns holds no value any more
        leaves = rest
        yield from _owned(owned, plan)

    for start, stop in cuts(leaves.sizes, limits.batch_bytes, limits.batch_leaves):
        batch = LeafBatch(leaves.take(start, stop), False, plan)
        yield batch
        del batch


def cuts(sizes: Sequence[int], most: int, most_items: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield where groups begin and end that weigh at most `most`; what weighs more is alone."""
    start = nbytes = 0
    for stop, size in enumerate(sizes):
        nbytes += size
        if stop > start and (nbytes > most or stop - start == most_items):
            yield start, stop
            start, nbytes = stop, size

    if len(sizes) > start:
        yield start, len(sizes)


def infos_of(leaves: Sequence[Batchable]) -> Iterator[ParamInfo]:
    """Yield where the leaves of a batch stand, without making those that are in columns."""
    if isinstance(leaves, ReadLeaves):
        return map(leaves.info, leaves.indices)

    return (leaf.info for leaf in leaves)


def part_of(leaves: Sequence[T], numbers: Sequence[int]) -> Sequence[T]:
    """Return some leaves of a batch, by number; in columns if they are."""
    if isinstance(leaves, Leaves | ReadLeaves):
        return cast("Sequence[T]", leaves.part(numbers))

    return tuple([leaves[number] for number in numbers])


def _owned(leaves: list[L], plan: Any) -> Iterator[LeafBatch[L]]:
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
        yield LeafBatch(tuple(owned), False, plan, handler)


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
