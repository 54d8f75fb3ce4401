"""Finds the leaves of a restore that can travel in packs. Pure, but for the handlers' questions."""

from __future__ import annotations

__all__ = ("Wanted", "make_packs")

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from penstock.kernel.adapter import AdaptedHandler
from penstock.kernel.messages import LeafSpec, ReadLeaf
from penstock.kernel.protocols import LeafHandler, PackedCheckpoint, PackingHandler, StoredCheckpoint
from penstock.kernel.read_pack import ReadPack
from penstock.kernel.run import RunLimits

SMALL: Final = 64 * 1024
"""Leaves of more bytes gain nothing by travelling together: they are read into their own memory."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What is to be restored, in columns of one length."""

    rows: Sequence[int]  #: places in the checkpoint's leaves
    specs: Sequence[LeafSpec]
    handlers: Sequence[LeafHandler | AdaptedHandler]
    likes: Sequence[Any] | None  #: None for a restore without a target


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
    others = set(range(len(wanted.rows)))
    packs: list[ReadPack] = []
    if isinstance(checkpoint, PackedCheckpoint):
        for handler, places in _by_handler(wanted):
            for pack in _packs(checkpoint, wanted, handler, places, make):
                others.difference_update(pack.indices)
                packs.extend(pack.cut(limits.batch_leaves, limits.batch_bytes))

    return packs, sorted(others)


def _by_handler(wanted: Wanted) -> Iterator[tuple[PackingHandler, list[int]]]:
    """Group small leaves by who builds them. Handlers need not be hashable."""
    sizes: dict[int, bool] = {}
    groups: dict[int, tuple[PackingHandler, list[int]]] = {}
    packing: dict[int, bool] = {}
    for place, (spec, handler) in enumerate(zip(wanted.specs, wanted.handlers, strict=True)):
        if id(handler) not in packing:
            packing[id(handler)] = isinstance(handler, PackingHandler)
            if isinstance(handler, PackingHandler):
                groups[id(handler)] = (handler, [])
        if id(spec) not in sizes:
            sizes[id(spec)] = 0 < spec.nbytes <= SMALL
        if sizes[id(spec)] and packing[id(handler)]:
            groups[id(handler)][1].append(place)

    yield from groups.values()


def _packs(
    checkpoint: PackedCheckpoint,
    wanted: Wanted,
    handler: PackingHandler,
    places: list[int],
    make: Callable[[int], ReadLeaf],
) -> Iterator[ReadPack]:
    specs = [wanted.specs[place] for place in places]
    likes = None if wanted.likes is None else [wanted.likes[place] for place in places]
    details = handler.pack_details(specs, likes)
    chunks = checkpoint.whole_chunks([wanted.rows[place] for place in places])
    nbytes = {id(spec): spec.nbytes for spec in {id(spec): spec for spec in specs}.values()}
    made: dict[int, ReadLeaf] = {}
    columns = (places, specs, details, chunks.offsets, chunks.crc32cs)
    for number, file in enumerate(chunks.files):
        chosen = [
            at
            for at, (id_, detail) in enumerate(zip(chunks.ids, details, strict=True))
            if id_ == number and detail is not None
        ]
        if chosen:
            indices, its_specs, its_details, offsets, crc32cs = [
                column if len(chosen) == len(places) else [column[at] for at in chosen] for column in columns
            ]
            yield ReadPack(
                handler=handler,
                file=file,
                indices=indices,
                specs=its_specs,
                details=its_details,
                offsets=offsets,
                crc32cs=crc32cs,
                sizes=[nbytes[id(spec)] for spec in its_specs],
                make=make,
                made=made,
            )
