"""Finds the leaves of a restore that can travel in packs. Pure, except for calls to handlers."""

from __future__ import annotations

__all__ = ("Wanted", "make_packs")

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, Final, TypeVar, final

from penstock.kernel.messages.packs import ReadLeaf, ReadPack
from penstock.kernel.pipeline.run_context import RunLimits
from penstock.kernel.protocols.checkpoints import PackedCheckpoint, StoredCheckpoint
from penstock.kernel.protocols.leaf import LeafSpec, ParamInfo, StoredLeaf
from penstock.kernel.protocols.leaf_handlers import LeafHandler, PackingHandler

T = TypeVar("T")

SMALL: Final = 64 * 1024
"""Bytes of a chunk. Leaves of larger chunks gain nothing by travelling together."""

MOST: Final = 16 * SMALL
"""Bytes of a leaf in several chunks. To bring them together costs a copy, and to read each alone a call."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The leaves of a result that are read, in columns of one length."""

    places: Sequence[int]  #: places in the result, in order
    rows: Sequence[int]  #: places in the checkpoint's leaves
    specs: Sequence[LeafSpec]
    handlers: Sequence[LeafHandler]
    likes: Sequence[Any] | None  #: None for a restore without a target

    @property
    def specs_once(self) -> Iterable[LeafSpec]:
        """The distinct `specs`, usually few."""
        return dict(zip(map(id, self.specs), self.specs, strict=True)).values()


def make_packs(
    checkpoint: StoredCheckpoint,
    wanted: Wanted,
    changed: Collection[int],
    limits: RunLimits,
    make: Callable[[int], ReadLeaf],
) -> tuple[list[ReadPack], Sequence[int]]:
    """Group small leaves that have the same handler and lie in the same file.

    Args:
        checkpoint: The checkpoint that stores them.
        wanted: All leaves that are read.
        changed: Places of leaves whose dtype or shape changes; these are never packed.
        limits: How many leaves and bytes a pack may have.
        make: Makes the leaf at a place of the result. Called only if a stage looks at single leaves.

    Returns:
        The packs, and the places of all other leaves.
    """
    others = set(wanted.places)
    packs: list[ReadPack] = []
    if isinstance(checkpoint, PackedCheckpoint):
        infos = _Infos(checkpoint.leaves, wanted)
        for handler, numbers in _by_handler(wanted, changed):
            for pack in _packs(checkpoint, wanted, handler, numbers, infos, make):
                others.difference_update(pack.indices)
                packs.extend(pack.cut(limits.batch_leaves, limits.batch_bytes))

    return packs, sorted(others)


@final
class _Infos:
    """Maps a place in the result to the `ParamInfo` of its stored leaf."""

    __slots__ = ("_leaves", "_rows")

    def __init__(self, leaves: Sequence[StoredLeaf], wanted: Wanted) -> None:
        self._leaves = leaves
        self._rows: Sequence[int] | Mapping[int, int] = wanted.rows
        if not isinstance(wanted.places, range):
            self._rows = dict(zip(wanted.places, wanted.rows, strict=True))

    def __call__(self, place: int) -> ParamInfo:
        return self._leaves[self._rows[place]].info


def _by_handler(wanted: Wanted, changed: Collection[int]) -> Iterator[tuple[PackingHandler, list[int]]]:
    """Yield each packing handler with the positions of its small leaves. Handlers need not be hashable."""
    handlers = {id(handler): handler for handler in wanted.handlers}
    small = {id(spec): _is_small(spec) for spec in wanted.specs_once}
    is_small = list(map(small.__getitem__, map(id, wanted.specs)))
    for number, handler in handlers.items():
        if isinstance(handler, PackingHandler):
            numbers = [at for at, is_one in enumerate(is_small) if is_one]
            if len(handlers) > 1:
                numbers = [at for at in numbers if id(wanted.handlers[at]) == number]
            if changed:
                numbers = [at for at in numbers if wanted.places[at] not in changed]

            yield handler, numbers


def _is_small(spec: LeafSpec) -> bool:
    return spec.shape is not None and spec.chunk_nbytes <= SMALL and spec.nbytes <= MOST


def _packs(
    checkpoint: PackedCheckpoint,
    wanted: Wanted,
    handler: PackingHandler,
    numbers: Sequence[int],
    infos: Callable[[int], ParamInfo],
    make: Callable[[int], ReadLeaf],
) -> Iterator[ReadPack]:
    details = handler.pack_details(
        _chosen(wanted.specs, numbers), None if wanted.likes is None else _chosen(wanted.likes, numbers)
    )
    chunks = checkpoint.whole_chunks(_chosen(wanted.rows, numbers))
    nbytes = {id(spec): spec.nbytes for spec in wanted.specs_once}
    made: dict[int, ReadLeaf] = {}
    fits = list(map(is_not, details, itertools.repeat(None)))
    by_file: list[list[int]] = [[] for _ in chunks.files]  # there may be as many files as leaves
    for at, (file_id, fit) in enumerate(zip(chunks.ids, fits, strict=True)):
        if fit and file_id >= 0:
            by_file[file_id].append(at)

    for file, there in zip(chunks.files, by_file, strict=True):
        if there:
            chosen = _chosen(numbers, there)
            specs = _chosen(wanted.specs, chosen)
            yield ReadPack(
                handler=handler,
                file=file,
                indices=_chosen(wanted.places, chosen),
                specs=specs,
                details=_chosen(details, there),
                offsets=_chosen(chunks.offsets, there),
                crc32cs=_chosen(chunks.crc32cs, there),
                sizes=list(map(nbytes.__getitem__, map(id, specs))),
                info=infos,
                make=make,
                made=made,
            )


def _chosen(column: Sequence[T], numbers: Sequence[int]) -> Sequence[T]:
    return column if len(numbers) == len(column) else [column[at] for at in numbers]
