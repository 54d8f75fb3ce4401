"""Groups leaves into messages, and pieces and reads into units in flight."""

from __future__ import annotations

__all__ = ("Remaining", "adjacent", "batched", "batched_columns", "cuts", "grouped")

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, final

from penstock.kernel.messages.leaves import Leaf, Leaves
from penstock.kernel.messages.save import Batchable, LeafBatch
from penstock.kernel.protocols.files_handler import FilesHandler

if TYPE_CHECKING:
    from penstock.kernel.pipeline.run_context import RunLimits


class _Weighs(Protocol):
    @property
    def nbytes(self) -> int: ...


L = TypeVar("L", bound=Batchable)
W = TypeVar("W", bound=_Weighs)
T = TypeVar("T")

LEAST: Final = 4 * 2**20
"""Bytes. Smaller messages would cost more than workers that wait for the last one."""

STEP: Final = 2 * 2**20
"""Bytes. Pieces cut at its multiples begin on a page of the file, and are written in whole blocks."""


def batched(
    leaves: list[L], limits: RunLimits, *, prioritised: bool = False, plan: Any = None
) -> Iterator[LeafBatch[L]]:
    """Yield the leaves in order, grouped within the limits; a leaf above `batch_bytes` goes alone.

    All leaves of a handler that keeps files of its own are one batch, which comes before the others.
    The list is emptied as it goes, so that leaves already passed on are not kept alive.
    """
    yield from _owned(leaves, plan, prioritised=prioritised)
    leaves.reverse()
    while leaves:
        batch = [leaves.pop()]
        nbytes = batch[0].nbytes
        while leaves and len(batch) < limits.batch_leaves:
            nbytes += leaves[-1].nbytes
            if nbytes > limits.batch_bytes:
                break

            batch.append(leaves.pop())

        message = LeafBatch(tuple(batch), prioritised, plan)
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
        yield from _owned(owned, plan, prioritised=False)

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


def _owned(leaves: list[L], plan: Any, *, prioritised: bool) -> Iterator[LeafBatch[L]]:
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
        yield LeafBatch(tuple(owned), prioritised, plan, handler)


@final
@dataclass(frozen=True, slots=True)
class Remaining:
    """What is still to come, and for how many workers.

    Workers end together if the last messages are small. Otherwise one of them moves a large one while the
    others have nothing to do. ("Guided self-scheduling", Polychronopoulos and Kuck 1987: each takes its share
    of what is left.)
    """

    nbytes: int  #: 0 or less if it is not known
    n_workers: int

    def message_bytes(self, most: int) -> int:
        """Return how large the next message may be: `most`, but less towards the end."""
        if self.nbytes <= 0 or self.nbytes >= self.n_workers * most:
            return most

        return min(most, max(LEAST, self.nbytes // self.n_workers // STEP * STEP))

    def without(self, nbytes: int) -> Remaining:
        """Return what remains after so many bytes."""
        return Remaining(self.nbytes - nbytes, self.n_workers)


UNKNOWN: Final = Remaining(0, 1)
"""All messages are as large as they may be."""


def grouped(
    items: Iterable[W], most: int, weigh: Callable[[W], int] | None = None, remaining: Remaining = UNKNOWN
) -> Iterator[tuple[W, ...]]:
    """Yield the items in order, in groups that weigh at most `most` bytes.

    An item that weighs more is yielded alone.

    Args:
        items: Whatever has a weight.
        most: Bytes of a group.
        weigh: Gives the bytes of an item; by default its `nbytes`.
        remaining: What is to come, these items included; towards its end groups are smaller.
    """
    group: list[W] = []
    nbytes = 0
    for item in items:
        weight = item.nbytes if weigh is None else weigh(item)
        if group and nbytes + weight > remaining.message_bytes(most):
            yield tuple(group)
            remaining = remaining.without(nbytes)
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
