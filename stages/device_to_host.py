"""Copies leaves to the host under the memory budget. After the last one, the save is staged."""

from __future__ import annotations

__all__ = ("DeviceToHost",)

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, cast, final

import numpy as np

from penstock.kernel.concurrency.single_thread import OneThread, one_thread
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import ChangedLeafError
from penstock.kernel.memory.buffers import give_back_freed_memory
from penstock.kernel.memory.byte_account import ByteLease
from penstock.kernel.messages.leaves import Leaf, Leaves, in_columns
from penstock.kernel.messages.save import LeafBatch, Pack, StagedBatch
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.protocols.files_handler import FilesHandler
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.leaf_handlers import (
    BufferHandler,
    ChunkBuffersHandler,
    ChunkingHandler,
    LeafHandler,
)
from penstock.kernel.reports.statistics import Advice
from penstock.kernel.storage.byte_placement import placement_of
from penstock.stages.common.batching import cuts
from penstock.stages.common.files_handlers import by_folder, save_by_handler
from penstock.stages.common.piece_groups import (
    OutputRoom,
    PieceGroup,
    piece_groups,
    plan_pieces,
    take_pieces,
)
from penstock.stages.common.planned_leaves import described

PACKED_BELOW = 64 * 1024  # for a larger chunk the cost of its own piece is negligible
PACKED_TOGETHER_BELOW = 16 * PACKED_BELOW  # for a leaf in several chunks: they are copied


TIGHT = 2**30
"""Below this budget, copies made by jax are copied again, by a single thread, into memory that returns to
the system when freed. Otherwise the freed copies that the allocator keeps per thread would exceed the budget
several times. For larger budgets that is little, and speed matters more."""


@final
@dataclass(frozen=True, slots=True)
class DeviceToHost:
    """Takes `LeafBatch`es of a save, yields `StagedBatch`es.

    Small leaves are gathered into packs, which are copies. Of the others, immutable memory that is already
    on the host is used in place, without a lease. Everything else is copied under a lease, in groups of at
    most `piece_bytes`, so a leaf larger than the budget streams through it; with a codec, each chunk must
    fit. A leaf's value is released once it is staged. A handler that keeps files of its own copies its
    leaves itself, in one call.
    """

    messages: ClassVar[Messages] = {LeafBatch[Leaf]: StagedBatch}
    advice: ClassVar[Advice] = Advice(
        work=(
            'Copies to the host take that long: `staging="overlap"` lets the program go on '
            "meanwhile, until it awaits `save.staged()`."
        ),
        memory=(
            "Raise `[memory] limit_bytes` (the argument `memory_limit`), or "
            "`save_device_host_concurrent_bytes` if that is lower."
        ),
    )

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        if run.memory.limit >= TIGHT:
            yield _Stager(run, run.threads).stage
            return

        async with one_thread(at_end=give_back_freed_memory) as thread:
            yield _Stager(run, thread).stage


@final
class _Stager:
    def __init__(self, run: SaveRun, thread: Threads | OneThread) -> None:
        self._run = run
        self._thread = thread  #: makes the copies
        self._most = run.limits.piece_bytes

    async def stage(self, batch: LeafBatch[Leaf], /) -> AsyncIterator[StagedBatch]:
        threads, prioritised, plan = self._run.threads, batch.prioritised, batch.plan
        if not batch.leaves:
            yield StagedBatch(plan=plan)
            return
        if batch.handler is not None:
            if plan is not None and plan.joint is not None:
                await plan.joint.agree(plan.joint)  # it begins to write at once, so there must be a place

            for folder, leaves in by_folder(self._run, batch.leaves):
                staged = await self._stage_by_handler(leaves, batch.handler, folder, prioritised=prioritised)
                yield replace(staged, plan=plan)

            return

        columns = in_columns(batch.leaves)
        if not columns.are_described:
            changed = [leaf for leaf in batch.leaves if not leaf.is_described]
            await threads.run(_check_changed, changed)

        room = OutputRoom(plan)
        small, rest = self._divide(columns, room)
        sizes = columns.sizes
        for start, stop in cuts([sizes[at] for at in small], self._most):
            pack = columns.part(small[start:stop])
            yield replace(await self._stage_pack(pack, room, prioritised=prioritised), plan=plan)

        if rest:
            free, planned = await threads.run(plan_pieces, columns.part(rest), self._most, room)
            if free is not None:
                yield replace(free, plan=plan)

            groups = piece_groups(planned, self._most)
            async with aclosing(self._stage_groups(groups, prioritised=prioritised)) as staging:
                async for staged in staging:
                    yield replace(staged, plan=plan)

    def _divide(self, leaves: Leaves, room: OutputRoom) -> tuple[list[int], list[int]]:
        """Choose what is packed, leaves of whole cache lines first, so that each begins on a cache line.

        A mapped restore uses such arrays in place. Of the others, those large enough to be worth it go alone.

        Returns:
            The numbers of the leaves that are packed, and of all others.
        """
        even: list[int] = []
        odd: list[int] = []
        rest: list[int] = []
        known: dict[tuple[int, int], list[int]] = {}  # leaves of one spec and handler go the same way
        for number, (spec, handler) in enumerate(zip(leaves.specs, leaves.handlers, strict=True)):
            kind = id(spec), id(handler)
            chosen = known.get(kind)
            if chosen is None:
                is_odd = self._packed(spec, handler)
                chosen = known[kind] = rest if is_odd is None else odd if is_odd else even

            chosen.append(number)

        if room.changes_any or room.divides:
            alone = {at for at in (*even, *odd) if room.goes_alone(leaves.indices[at], leaves.specs[at])}
            rest = sorted([*rest, *alone])
            even, odd = ([at for at in chosen if at not in alone] for chosen in (even, odd))

        return [*even, *odd], rest

    def _packed(self, spec: LeafSpec, handler: LeafHandler) -> bool | None:
        """Whether a leaf is packed, and then not of whole cache lines; None if it goes alone."""
        at, nbytes = placement_of(self._run.store), spec.nbytes
        is_odd = bool(nbytes % at.line_bytes)
        if not nbytes or spec.codec is not None or spec.chunk_nbytes > PACKED_BELOW:
            return None
        if nbytes > min(PACKED_TOGETHER_BELOW, self._most) or (is_odd and nbytes >= at.page_bytes):
            return None

        if spec.is_single_chunk:
            return is_odd if isinstance(handler, BufferHandler) else None

        return is_odd if isinstance(handler, ChunkBuffersHandler) else None

    async def _stage_pack(self, leaves: Leaves, room: OutputRoom, *, prioritised: bool) -> StagedBatch:
        cost = sum(leaves.sizes)
        if room.changes_any:
            cost += sum(map(room.of, leaves.indices, leaves.specs))

        first = leaves.infos[leaves.indices[0]]
        lease = await self._run.lease(cost, first.key_path, prioritised=prioritised)
        with releasing(lease):
            pack = await self._run.threads.run(_gather, leaves)

        return StagedBatch(pack.leaves, packs=(pack,), staged=lease)

    async def _stage_groups(
        self, groups: Iterator[PieceGroup], *, prioritised: bool
    ) -> AsyncGenerator[StagedBatch]:
        """Copy one group after another; the copies of the next begin first, if there is room for them.

        So devices do not wait while a group is leased, taken and passed on.
        """
        tight = isinstance(self._thread, OneThread)
        lease: ByteLease | None = None
        begun = False
        group = next(groups, None)
        while group is not None:
            if group.cost and not begun:
                lease = self._run.memory.acquire_nowait(group.cost, flow=self._run.flow)
                lease = lease or await self._run.lease(group.cost, group.key_path, prioritised=prioritised)

            following = next(groups, None)
            with releasing(self._lease_ahead(following)) as ahead:
                with releasing(lease):
                    if group.is_there:
                        pieces = group.take()
                    else:
                        after = None if ahead is None else following
                        pieces = await self._thread.run(take_pieces, group, begun, after, tight)

                yield StagedBatch(group.leaves, pieces, staged=lease)

            group, lease, begun = following, ahead, ahead is not None

    def _lease_ahead(self, group: PieceGroup | None) -> ByteLease | None:
        """Lease the bytes of a group that can begin early. Never waits: the group before it holds bytes."""
        if group is None or not group.can_begin:
            return None

        return self._run.memory.acquire_nowait(group.cost, flow=self._run.flow)

    async def _stage_by_handler(
        self, leaves: tuple[Leaf, ...], handler: FilesHandler, folder: str, *, prioritised: bool
    ) -> StagedBatch:
        run = self._run
        nbytes = handler.write_size(leaves)
        about = {"handler": handler.name, "n_leaves": len(leaves)}
        lease = await run.lease(nbytes, leaves[0].info.key_path, prioritised=prioritised, about=about)
        with releasing(lease):
            pending = await save_by_handler(run, leaves, handler, folder)

        return StagedBatch(pending.leaves, pending=(pending,), staged=lease)


def _check_changed(leaves: Sequence[Leaf]) -> None:
    """Refuse leaves of which a stage changed the value but not the spec, or the spec but not the value."""
    for leaf in leaves:
        handler, spec = leaf.handler, leaf.spec
        if spec.shape is None:
            continue

        found = handler.describe(leaf.value, leaf.info)
        # It casts to the requested dtype.
        follows = isinstance(handler, ChunkingHandler) and handler.follows_spec
        if found.shape != spec.shape or (found.dtype != spec.dtype and not follows):
            raise ChangedLeafError(leaf.info.key_path, described(spec), described(found))


@contextmanager
def releasing(lease: ByteLease | None) -> Generator[ByteLease | None]:
    """Release the lease if the block fails or is left; otherwise the block passes it on."""
    try:
        yield lease
    except BaseException:
        if lease is not None:
            lease.release()

        raise


def _gather(leaves: Leaves) -> Pack:
    """Copy the chunks of small leaves into one buffer, one after another. In a worker thread."""
    try:
        data = _joined(_buffers(leaves))
    except Exception:  # one by one, to find out which leaf failed, and why
        data = memoryview(b"".join([_copied([leaf])[0] for leaf in leaves]))

    return Pack(leaves.without_values(), data)


def _joined(buffers: list[Any]) -> memoryview:
    """Copy buffers one after another.

    An array that was asked for its buffer remembers 56 bytes about it for as long as it lives. To join arrays
    of one dtype as arrays does without, and is as fast.
    """
    kinds = {each.dtype if type(each) is np.ndarray else None for each in buffers}
    if len(kinds) > 1 or None in kinds:
        return memoryview(b"".join(buffers))

    return np.concatenate(buffers, axis=None).view(np.uint8).data


def _buffers(leaves: Leaves) -> list[Any]:
    values, handlers, specs = leaves.values, leaves.handlers, leaves.specs
    assert values is not None
    # Leaves that share a spec have one signature, unless a stage made them.
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, (spec, each) in enumerate(zip(specs, handlers, strict=True)):
        kind = (id(spec), id(each)) if leaves.are_described else (number,)
        alike.setdefault(kind, []).append(number)

    buffers: list[Any] = [None] * len(values)
    for numbers in alike.values():
        handler, spec = handlers[numbers[0]], specs[numbers[0]]
        if spec.is_single_chunk:
            of_values = cast("BufferHandler", handler).buffers
        else:
            of_values = cast("ChunkBuffersHandler", handler).chunk_buffers

        found = of_values([values[number] for number in numbers], spec)
        for number, buffer in zip(numbers, found, strict=True):
            buffers[number] = buffer

    absent = [number for number, buffer in enumerate(buffers) if buffer is None]
    for number, data in zip(absent, _copied([leaves[number] for number in absent]), strict=True):
        buffers[number] = data

    return buffers


def _copied(leaves: Sequence[Leaf]) -> list[bytes]:
    """Copy the chunks of each leaf; copies from devices overlap, those of one leaf and of several."""
    plans = [
        sorted(leaf.handler.pieces(leaf, leaf.spec.nbytes), key=attrgetter("chunk", "start"))
        for leaf in leaves
    ]
    for plan in itertools.chain.from_iterable(plans):
        if plan.begin is not None:
            plan.begin()

    return [b"".join([plan.take() for plan in of_leaf]) for of_leaf in plans]
