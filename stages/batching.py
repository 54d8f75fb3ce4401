"""How leaves are grouped into messages, and pieces and reads into what is in flight at once."""

from __future__ import annotations

__all__ = ("batched", "grouped")

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.kernel.messages import Batchable, LeafBatch

if TYPE_CHECKING:
    from penstock.kernel.run import RunLimits


class _Weighs(Protocol):
    @property
    def nbytes(self) -> int: ...


L = TypeVar("L", bound=Batchable)
W = TypeVar("W", bound=_Weighs)


def batched(leaves: Sequence[L], limits: RunLimits, *, prioritised: bool = False) -> Iterator[LeafBatch[L]]:
    """Yield the leaves in order, small ones together, one above `batch_bytes` alone."""
    batch: list[L] = []
    nbytes = 0
    for leaf in leaves:
        weight = leaf.nbytes
        if batch and (len(batch) == limits.batch_leaves or nbytes + weight > limits.batch_bytes):
            yield LeafBatch(tuple(batch), prioritised)
            batch, nbytes = [], 0

        batch.append(leaf)
        nbytes += weight

    if batch:
        yield LeafBatch(tuple(batch), prioritised)


def grouped(items: Iterable[W], most: int) -> Iterator[tuple[W, ...]]:
    """Yield the items in order, as many at a time as weigh at most `most` bytes together.

    An item that weighs more is yielded alone.
    """
    group: list[W] = []
    nbytes = 0
    for item in items:
        weight = item.nbytes
        if group and nbytes + weight > most:
            yield tuple(group)
            group, nbytes = [], 0

        group.append(item)
        nbytes += weight

    if group:
        yield tuple(group)
