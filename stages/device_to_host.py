"""Copies leaves to the host under the memory budget. After the last one, the save is staged."""

from __future__ import annotations

__all__ = ("DeviceToHost",)

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias, cast, final

from penstock.kernel.concurrency.single_thread import OneThread, one_thread
from penstock.kernel.concurrency.threads import Threads
from penstock.kernel.errors import ChangedLeafError
from penstock.kernel.memory.buffers import give_back_freed_memory, in_memory_of_its_own
from penstock.kernel.memory.byte_account import ByteLease
from penstock.kernel.messages.leaves import Leaf, Leaves, in_columns
from penstock.kernel.messages.save import LeafBatch, Pack, Piece, SavePlan, StagedBatch
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
from penstock.kernel.protocols.written import PiecePlan
from penstock.kernel.storage.byte_placement import placement_of
from penstock.stages.common.batching import cuts
from penstock.stages.common.codec_rules import encoding_room
from penstock.stages.common.files_handlers import by_folder, save_by_handler
from penstock.stages.common.planned_leaves import described

_Planned: TypeAlias = "tuple[Leaf, PiecePlan | None, bool]"
"""A leaf without its value, one of its pieces (None if it has none), and whether it is the last."""

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
            for folder, leaves in by_folder(self._run, batch.leaves):
                staged = await self._stage_by_handler(leaves, batch.handler, folder, prioritised=prioritised)
                yield replace(staged, plan=plan)

            return

        columns = in_columns(batch.leaves)
        if not columns.are_described:
            changed = [leaf for leaf in batch.leaves if not leaf.is_described]
            await threads.run(_check_changed, changed)

        room = _Room(plan)
        small, rest = self._divide(columns, room)
        sizes = columns.sizes
        for start, stop in cuts([sizes[at] for at in small], self._most):
            pack = columns.part(small[start:stop])
            yield replace(await self._stage_pack(pack, room, prioritised=prioritised), plan=plan)

        if rest:
            free, planned = await threads.run(_plan, columns.part(rest), self._most, room)
            if free is not None:
                yield replace(free, plan=plan)

            for group in _groups(planned, self._most):
                yield replace(await self._stage_group(group, prioritised=prioritised), plan=plan)

    def _divide(self, leaves: Leaves, room: _Room) -> tuple[list[int], list[int]]:
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

    async def _stage_pack(self, leaves: Leaves, room: _Room, *, prioritised: bool) -> StagedBatch:
        cost = sum(leaves.sizes)
        if room.changes_any:
            cost += sum(map(room.of, leaves.indices, leaves.specs))

        first = leaves.infos[leaves.indices[0]]
        lease = await self._run.lease(cost, first.key_path, prioritised=prioritised)
        with releasing(lease):
            pack = await self._run.threads.run(_gather, leaves)

        return StagedBatch(pack.leaves, packs=(pack,), staged=lease)

    async def _stage_group(self, group: list[_Planned], *, prioritised: bool) -> StagedBatch:
        cost = sum(plan.cost for _, plan, _ in group if plan is not None)
        key_path = group[0][0].info.key_path
        lease = await self._run.lease(cost, key_path, prioritised=prioritised) if cost else None
        with releasing(lease):
            pieces = await self._thread.run(_take, group, isinstance(self._thread, OneThread))

        return StagedBatch(tuple(leaf for leaf, _, last in group if last), pieces, staged=lease)

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
def releasing(lease: ByteLease | None) -> Generator[None]:
    """Release the lease if the block fails; otherwise the block passes it on."""
    try:
        yield
    except BaseException:
        if lease is not None:
            lease.release()

        raise


def _gather(leaves: Leaves) -> Pack:
    """Copy the chunks of small leaves into one buffer, one after another. In a worker thread."""
    try:
        data = b"".join(_buffers(leaves))
    except Exception:  # one by one, to find out which leaf failed, and why
        data = b"".join([_copied([leaf])[0] for leaf in leaves])

    return Pack(leaves.without_values(), memoryview(data))


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


@final
class _Room:
    """Bytes for the output of later stages, leased together with those of the leaf."""

    __slots__ = ("_plan", "_planned")

    def __init__(self, plan: SavePlan | None) -> None:
        self._planned = plan
        self._plan = None if plan is None or not plan.changes else plan

    @property
    def changes_any(self) -> bool:
        """Whether a later stage changes any leaf."""
        return self._plan is not None

    @property
    def divides(self) -> bool:
        """Whether other processes write parts of leaves."""
        return self._planned is not None and self._planned.joint is not None

    def goes_alone(self, index: int, spec: LeafSpec) -> bool:
        """Whether a leaf cannot be packed: a stage encodes it, or this process writes only a part of it."""
        plan = self._planned
        if plan is None or plan.joint is None:
            return self.is_coded(index, spec)

        return plan.joint.shares[index] != plan.specs[index].nbytes or self.is_coded(index, spec)

    def of(self, index: int, spec: LeafSpec, nbytes: int | None = None) -> int:
        """Length after later stages of a leaf, or of a part with `nbytes`; 0 if no stage changes it."""
        if self._plan is None or index not in self._plan.changes or not spec.nbytes:
            return 0

        after = self._plan.specs[index]
        part = spec.nbytes if nbytes is None else nbytes
        room = -(-after.nbytes * part // spec.nbytes)
        return room if after.codec is None else encoding_room(room)

    def is_coded(self, index: int, spec: LeafSpec) -> bool:
        """Whether a leaf has a codec or gets one in a later stage: then its chunks travel whole."""
        if spec.codec is not None or self._plan is None:
            return spec.codec is not None

        return self._plan.specs[index].codec is not None


def _plan(leaves: Leaves, piece_bytes: int, room: _Room) -> tuple[StagedBatch | None, list[_Planned]]:
    """Ask each handler for its pieces. In a worker thread: it may wait for a computation to end.

    Returns:
        The pieces of the leaves that cost nothing, taken at once; and what is to be leased and taken.
    """
    free: list[_Planned] = []
    planned: list[_Planned] = []
    for leaf in leaves:
        plans = list(_pieces(leaf, piece_bytes, room))
        staged = leaf.without_value()
        chosen = planned if any(plan.cost for plan in plans) else free
        for at, plan in enumerate(plans, start=1):
            chosen.append((staged, plan, at == len(plans)))

        if not plans:
            chosen.append((staged, None, True))

    if not free:
        return None, planned

    return StagedBatch(tuple([leaf for leaf, _, last in free if last]), _take(free)), planned


def _pieces(leaf: Leaf, piece_bytes: int, room: _Room) -> Iterator[PiecePlan]:
    """Plan the pieces of a leaf. A chunk with a codec is one piece, leased together with its output.

    If encoding leased its own bytes, staged pieces behind it could hold the whole budget: a deadlock.
    """
    spec = leaf.spec
    if not room.is_coded(leaf.index, spec):
        for plan in leaf.handler.pieces(leaf, piece_bytes):
            extra = room.of(leaf.index, spec, plan.nbytes)
            yield replace(plan, cost=plan.cost + extra) if extra else plan

        return

    for plan in leaf.handler.pieces(leaf, max(piece_bytes, spec.chunk_nbytes)):
        encoded = 0 if spec.codec is None else encoding_room(plan.nbytes)
        yield replace(plan, cost=plan.cost + encoded + room.of(leaf.index, spec, plan.nbytes))


def _groups(planned: list[_Planned], piece_bytes: int) -> Iterator[list[_Planned]]:
    """Yield groups that are leased and copied together; pieces without cost weigh nothing."""
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


def _take(group: list[_Planned], tight: bool = False) -> tuple[Piece, ...]:
    for _, plan, _ in group:  # copies from several devices overlap
        if plan is not None and plan.begin is not None:
            plan.begin()

    return tuple([_piece(leaf, plan, tight) for leaf, plan, _ in group if plan is not None])


def _piece(leaf: Leaf, plan: PiecePlan, tight: bool) -> Piece:
    data = plan.take()
    if tight and plan.cost:
        data = in_memory_of_its_own(data)

    return Piece(leaf, plan.chunk, plan.start, data, plan.cost)
