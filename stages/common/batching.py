"""How leaves are grouped into messages, and pieces and reads into what is in flight at once."""

from __future__ import annotations

__all__ = ("batched", "grouped")

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.kernel.messages.save import Batchable, LeafBatch

if TYPE_CHECKING:
    from penstock.kernel.pipeline.run_context import RunLimits


class _Weighs(Protocol):
    @property
    def nbytes(self) -> int: ...


L = TypeVar("L", bound=Batchable)
W = TypeVar("W", bound=_Weighs)


def batched(
    leaves: list[L], limits: RunLimits, *, prioritised: bool = False, plan: Any = None
) -> Iterator[LeafBatch[L]]:
    """Yield the leaves in order, as many together as the limits allow; one above `batch_bytes` goes alone.

    The list is emptied on the way: a leaf that was passed on is not kept alive by those that wait.
    """
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


def grouped(
    items: Iterable[W], most: int, weigh: Callable[[W], int] | None = None
) -> Iterator[tuple[W, ...]]:
    """Yield the items in order, as many at a time as weigh at most `most` bytes together.

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
