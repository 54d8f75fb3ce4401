"""Brings leaves to the host, under the memory budget. When it has passed on its last, a save is staged."""

from __future__ import annotations

__all__ = ("DeviceToHost",)

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias, final

from penstock.kernel.adapter import AdaptedHandler
from penstock.kernel.messages import Leaf, LeafBatch, Piece, PiecePlan, StagedBatch
from penstock.kernel.run import SaveRun
from penstock.kernel.stage import Actor

_Planned: TypeAlias = "tuple[Leaf, PiecePlan | None, bool]"
"""A leaf without its value, one of its pieces, and whether it is the last; None: it has no pieces."""


@final
@dataclass(frozen=True, slots=True)
class DeviceToHost:
    """Takes `LeafBatch`es of a save, yields `StagedBatch`es.

    Memory that already is on the host and that nobody will change is looked at, not copied, and
    costs nothing. Everything else is copied under a lease, in groups of at most `piece_bytes`, so a
    leaf larger than the budget streams through it. The leaf's value is let go of once it is staged.
    """

    @property
    def concurrency(self) -> int:
        """One, so that the prioritised are staged first and completely."""
        return 1

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""

        async def stage(batch: LeafBatch[Leaf], /) -> AsyncIterator[StagedBatch]:
            for leaf in batch.leaves:
                if isinstance(leaf.handler, AdaptedHandler):
                    yield await _stage_adapted(run, leaf, leaf.handler, prioritised=batch.prioritised)

            planned = await run.threads.run(_plan, batch, run.limits.piece_bytes)
            for group in _groups(planned, run.limits.piece_bytes):
                yield await _stage_group(run, group, prioritised=batch.prioritised)

        yield stage


async def _stage_group(run: SaveRun, group: list[_Planned], *, prioritised: bool) -> StagedBatch:
    cost = sum(plan.cost for _, plan, _ in group if plan is not None)
    key_path = group[0][0].info.key_path
    lease = await run.lease(cost, key_path, prioritised=prioritised) if cost else None
    try:
        pieces = await run.threads.run(_take, group)
    except BaseException:
        if lease is not None:
            lease.release()

        raise

    return StagedBatch(tuple(leaf for leaf, _, last in group if last), pieces, staged=lease)


async def _stage_adapted(
    run: SaveRun, leaf: Leaf, handler: AdaptedHandler, *, prioritised: bool
) -> StagedBatch:
    lease = await run.lease(handler.write_size(leaf), leaf.info.key_path, prioritised=prioritised)
    try:
        await run.workspace.open()
        pending = await handler.save(leaf, run.threads)
        run.background.append(pending)
    except BaseException:
        lease.release()
        raise

    return StagedBatch((leaf.without_value(),), pending=(pending,), staged=lease)


def _plan(batch: LeafBatch[Leaf], piece_bytes: int) -> list[_Planned]:
    """Ask each handler for its pieces. In a worker thread: it may wait for a computation to end."""
    planned: list[_Planned] = []
    for leaf in batch.leaves:
        if isinstance(leaf.handler, AdaptedHandler):
            continue

        plans = list(leaf.handler.pieces(leaf, piece_bytes))
        staged = leaf.without_value()
        for at, plan in enumerate(plans, start=1):
            planned.append((staged, plan, at == len(plans)))

        if not plans:
            planned.append((staged, None, True))

    return planned


def _groups(planned: list[_Planned], piece_bytes: int) -> Iterator[list[_Planned]]:
    """Yield what is leased and copied together; what costs nothing weighs nothing."""
    group: list[_Planned] = []
    total = 0
    for entry in planned:
        cost = entry[1].cost if entry[1] is not None else 0
        if group and cost and total + cost > piece_bytes:
            yield group
            group, total = [], 0

        group.append(entry)
        total += cost

    if group:
        yield group


def _take(group: list[_Planned]) -> tuple[Piece, ...]:
    return tuple(
        Piece(leaf, plan.chunk, plan.start, plan.take(), plan.cost)
        for leaf, plan, _ in group
        if plan is not None
    )
