"""Bounds the bytes on their way to or from the store. Serves both pipelines."""

from __future__ import annotations

__all__ = ("LimitBytes",)

import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, final

from penstock.kernel.concurrency.brief_steps import cuts
from penstock.kernel.memory.byte_account import ByteAccount, ByteLease, acquire_from_both
from penstock.kernel.messages.restore import PlannedBatch, ReadBatch
from penstock.kernel.messages.save import StagedBatch
from penstock.kernel.options import fit_fields
from penstock.kernel.pipeline.run_context import Run
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.protocols.leaf_handlers import FilesHandler, ReadLeaves
from penstock.kernel.protocols.reads import Read
from penstock.stages.messages.batching import grouped
from penstock.stages.planning.leaf_reads import scratch_bytes


@final
@dataclass(frozen=True, slots=True)
class LimitBytes:
    """Passes on pieces (of a save) or reads (of a restore) once their bytes fit the in-flight limit.

    A piece larger than the limit is split; messages without bytes pass. Order is kept. All saves share
    one account of bytes in flight, and all restores another: those of the `MemoryRegulator`.

    Attributes:
        in_flight_bytes: Bytes that this save or restore may have in flight at once, in its own account
            within the shared one; None for no separate limit.
    """

    messages: ClassVar[Messages] = {StagedBatch: StagedBatch, PlannedBatch: ReadBatch}
    advice: ClassVar[Advice] = Advice(
        busy=("It cuts what is too large into pieces: raise `piece_bytes` of `[save]` or `[restore]`."),
        memory_wait=(
            "Raise `[memory] limit_bytes`, or the bytes on their way at once: "
            "`save_concurrent_bytes`, `restore_concurrent_bytes`."
        ),
    )

    in_flight_bytes: int | None = field(default=None, metadata={"positive": True})

    def __post_init__(self) -> None:
        fit_fields(self, "limit_bytes")

    @asynccontextmanager
    async def open(self, run: Run, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one run."""
        own = None if self.in_flight_bytes is None else ByteAccount(self.in_flight_bytes)
        yield _Limiter(run, run.memory.in_flight(run.flow), own)


@final
class _Limiter:
    __slots__ = ("_most", "_own", "_run", "_shared")

    def __init__(self, run: Run, shared: ByteAccount, own: ByteAccount | None) -> None:
        self._run = run
        self._shared = shared
        self._own = own
        self._most = min(shared.limit if own is None else own.limit, shared.limit, run.limits.piece_bytes)

    def __call__(
        self, batch: StagedBatch | PlannedBatch, /
    ) -> AsyncIterator[StagedBatch] | AsyncIterator[ReadBatch]:
        if isinstance(batch, StagedBatch):
            return self._admit_extents(batch)
        if batch.handler is not None:
            return self._admit_handler(batch, batch.handler)

        return self._admit_reads(batch)

    async def _admit_extents(self, batch: StagedBatch) -> AsyncIterator[StagedBatch]:
        nbytes = batch.nbytes
        if nbytes <= self._most:  # it goes as it is
            yield replace(batch, in_flight=await self._let_in(nbytes))
            return

        # Cut here, so that the bytes in flight are bounded whatever the size of a batch.
        parts = itertools.chain.from_iterable([extents.cut(self._most) for extents in batch.extents])
        groups = list(grouped(parts, self._most))
        for group in groups[:-1]:
            lease = await self._let_in(sum([extents.nbytes for extents in group]))
            staged = batch.staged.split(sum([extents.cost for extents in group])) if batch.staged else None
            yield StagedBatch(extents=group, staged=staged, in_flight=lease, plan=batch.plan)

        # The last group takes the rest of the batch, because it completes the leaves.
        lease = await self._let_in(sum([extents.nbytes for extents in groups[-1]]))
        yield replace(batch, extents=groups[-1], in_flight=lease)

    async def _admit_reads(self, batch: PlannedBatch) -> AsyncIterator[ReadBatch]:
        if not batch.leaves:  # nothing is read: the batch only brings the plan
            yield ReadBatch((), (), plan=batch.plan)

        # A unit is a large leaf, or small ones in one group. All host bytes of a unit are leased at once,
        # buffers for its reads included: a holder of host bytes must never wait for more.
        leaves = ReadLeaves.of(batch.leaves)
        for start, stop in cuts(leaves.weights, self._most):
            unit = leaves.part(range(start, stop))
            reads, nbytes = unit.reads, unit.staging_bytes
            room: ByteLease | None = None
            if nbytes:
                key_path = unit.info(unit.indices[0]).key_path
                room = await self._run.lease(
                    nbytes + scratch_bytes(reads), key_path, prioritised=batch.prioritised
                )
            # Two leases: scratch bytes end with the reads, the buffers of the leaves later.
            staged = None if room is None else room.split(nbytes)
            try:
                for group in list(grouped(reads, self._most)) or [()]:
                    part = await self._admit_group(unit, group, room, prioritised=batch.prioritised)
                    message, staged = replace(part, staged=staged, plan=batch.plan), None
                    yield message
                    del message, part
            except BaseException:
                for held in (staged, room):
                    if held is not None:
                        held.release()

                raise

            del unit, reads

    async def _admit_handler(self, batch: PlannedBatch, handler: FilesHandler) -> AsyncIterator[ReadBatch]:
        """Admit leaves that their handler reads in one call, with the host bytes it says that holds.

        Where it does not know, a leaf counts as one piece, and all such leaves as no more than the limit.
        """
        run, leaves = self._run, tuple(batch.leaves)
        sizes = handler.read_sizes(leaves)
        known = sum([size for size in sizes if size is not None])
        unknown = sizes.count(None) * run.limits.piece_bytes
        nbytes = known + min(unknown, max(0, run.memory.limit_of(run.flow) - known))
        about = {"handler": handler.name, "n_leaves": len(leaves)}
        lease = await run.lease(nbytes, leaves[0].info.key_path, prioritised=batch.prioritised, about=about)
        yield ReadBatch(leaves, (), lease, handler=handler, plan=batch.plan)

    async def _admit_group(
        self,
        unit: ReadLeaves,
        group: tuple[Read, ...],
        room: ByteLease | None,
        *,
        prioritised: bool,
    ) -> ReadBatch:
        nbytes = scratch_bytes(group)
        if room is not None:
            scratch: ByteLease | None = room.split(nbytes)
        else:
            scratch = None
            if nbytes:
                key_path = unit.info(unit.indices[0]).key_path
                scratch = await self._run.lease(nbytes, key_path, prioritised=prioritised)
        try:
            weight = sum([read.nbytes for read in group])
            lease = await self._let_in(weight, prioritised=prioritised)
        except BaseException:
            if scratch is not None:
                scratch.release()

            raise

        return ReadBatch(unit, group, None, lease, scratch)

    async def _let_in(self, nbytes: int, *, prioritised: bool = False) -> ByteLease:
        shared, flow = self._shared, self._run.path
        if self._own is None:
            return await shared.acquire(nbytes, prioritised=prioritised, admit_oversize=True, flow=flow)

        return await acquire_from_both(self._own, shared, nbytes, prioritised=prioritised, flow=flow)
