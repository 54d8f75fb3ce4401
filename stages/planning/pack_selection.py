"""Finds the leaves of a restore that can travel in packs. Pure, but for the handlers' questions."""

from __future__ import annotations

__all__ = ("Wanted", "make_packs")

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, Final, TypeVar, final

from penstock.kernel.messages.packs import ReadPack
from penstock.kernel.messages.restore import ReadLeaf
from penstock.kernel.pipeline.run_context import RunLimits
from penstock.kernel.protocols.checkpoints import PackedCheckpoint, StoredCheckpoint
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo
from penstock.kernel.protocols.leaf_handlers import LeafHandler, PackingHandler

T = TypeVar("T")

SMALL: Final = 64 * 1024
"""Leaves of more bytes gain nothing by travelling together: they are read into their own memory."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What is to be restored, in columns of one length."""

    rows: Sequence[int]  #: places in the checkpoint's leaves
    specs: Sequence[LeafSpec]
    handlers: Sequence[LeafHandler]
    likes: Sequence[Any] | None  #: None for a restore without a target

    @property
    def specs_once(self) -> Iterable[LeafSpec]:
        """The distinct ones of `specs`, of which there are few."""
        return dict(zip(map(id, self.specs), self.specs, strict=True)).values()


def make_packs(
    checkpoint: StoredCheckpoint, wanted: Wanted, limits: RunLimits, make: Callable[[int], ReadLeaf]
) -> tuple[list[ReadPack], Sequence[int]]:
    """Put small leaves of one handler and one file together.

    Args:
        checkpoint: Where they lie.
        wanted: All leaves.
        limits: How many leaves and bytes a pack may have.
        make: Makes the leaf of one place, if somebody wants to see it.

    Returns:
        The packs, and the places of all other leaves.
    """

    def info(place: int) -> ParamInfo:
        return checkpoint.leaves[wanted.rows[place]].info

    others = set(range(len(wanted.rows)))
    packs: list[ReadPack] = []
    if isinstance(checkpoint, PackedCheckpoint):
        for handler, places in _by_handler(wanted):
            for pack in _packs(checkpoint, wanted, handler, places, info, make):
                others.difference_update(pack.indices)
                packs.extend(pack.cut(limits.batch_leaves, limits.batch_bytes))

    return packs, sorted(others)


def _by_handler(wanted: Wanted) -> Iterator[tuple[PackingHandler, list[int]]]:
    """Group small leaves by who builds them. Handlers need not be hashable."""
    handlers = {id(handler): handler for handler in wanted.handlers}
    small = {id(spec): 0 < spec.nbytes <= SMALL for spec in wanted.specs_once}
    is_small = list(map(small.__getitem__, map(id, wanted.specs)))
    for number, handler in handlers.items():
        if isinstance(handler, PackingHandler):
            places: Sequence[int] = range(len(is_small))
            if len(handlers) > 1:
                places = [place for place, other in enumerate(wanted.handlers) if id(other) == number]

            yield handler, [place for place in places if is_small[place]]


def _packs(
    checkpoint: PackedCheckpoint,
    wanted: Wanted,
    handler: PackingHandler,
    places: Sequence[int],
    info: Callable[[int], ParamInfo],
    make: Callable[[int], ReadLeaf],
) -> Iterator[ReadPack]:
    details = handler.pack_details(
        _chosen(wanted.specs, places), None if wanted.likes is None else _chosen(wanted.likes, places)
    )
    chunks = checkpoint.whole_chunks(_chosen(wanted.rows, places))
    nbytes = {id(spec): spec.nbytes for spec in wanted.specs_once}
    made: dict[int, ReadLeaf] = {}
    fits = list(map(is_not, details, itertools.repeat(None)))
    for number, file in enumerate(chunks.files):
        there = [
            at for at, (id_, fit) in enumerate(zip(chunks.ids, fits, strict=True)) if fit and id_ == number
        ]
        if there:
            indices = _chosen(places, there)
            specs = _chosen(wanted.specs, indices)
            yield ReadPack(
                handler=handler,
                file=file,
                indices=indices,
                specs=specs,
                details=_chosen(details, there),
                offsets=_chosen(chunks.offsets, there),
                crc32cs=_chosen(chunks.crc32cs, there),
                sizes=list(map(nbytes.__getitem__, map(id, specs))),
                info=info,
                make=make,
                made=made,
            )


def _chosen(column: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    return column if len(places) == len(column) else [column[at] for at in places]
