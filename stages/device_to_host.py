"""Copies leaves to the host under the memory budget. After the last one, the save is staged.

Small leaves are packed into one buffer. A large leaf becomes a row of `PieceGroup`s, each at most as large as
the budget allows.
"""

from __future__ import annotations

__all__ = ("DeviceToHost",)

import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Final, TypeAlias, cast, final

import numpy as np

from penstock.kernel.concurrency.brief_steps import cuts
from penstock.kernel.concurrency.threads import OneThread, Threads, one_thread
from penstock.kernel.errors import ChangedLeafError
from penstock.kernel.memory.buffers import MAPPED_FROM, UsedMemory, give_back_freed_memory, is_mapped
from penstock.kernel.memory.byte_account import ByteLease, releasing
from penstock.kernel.messages.save import Extents, Leaf, LeafBatch, Leaves, SavePlan, StagedBatch, in_columns
from penstock.kernel.pipeline.run_context import SaveRun
from penstock.kernel.pipeline.stage import Actor, Messages
from penstock.kernel.pipeline.statistics import Advice
from penstock.kernel.pipeline.together import together
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.leaf_handlers import (
    BufferHandler,
    ChunkingHandler,
    FilesHandler,
    LeafHandler,
)
from penstock.kernel.protocols.written import PiecePlan
from penstock.stages.files import by_folder, save_by_handler
from penstock.stages.messages.batching import described, encoding_room

PACKED_BELOW = 64 * 1024  # for a larger chunk the cost of its own piece is negligible
PACKED_TOGETHER_BELOW = 16 * PACKED_BELOW  # for a leaf in several chunks: they are copied


AT_ONCE: Final = min(4, os.cpu_count() or 1)
"""Groups that the processors copy at the same time."""

TIGHT: Final = 2**30
"""Below this budget, unless another is set, copies made by jax are copied again, by a single thread, into
memory that is used for the next ones, and then returns to the system. Otherwise the freed copies that the
allocator keeps per thread would exceed the budget several times. For larger budgets that is little, and speed
matters more."""


@final
@dataclass(frozen=True, slots=True)
class DeviceToHost:
    """Takes `LeafBatch`es of a save, yields `StagedBatch`es.

    Small leaves are gathered into packs, which are copies. Of the others, immutable memory that is already
    on the host is used in place, without a lease. Everything else is copied under a lease, in groups of at
    most `piece_bytes`, so a leaf larger than the budget streams through it; with a codec, each chunk must
    fit. A leaf's value is released once it is staged. A handler that keeps its own files copies its
    leaves itself, in one call.

    Attributes:
        copies_first: Whether what is on the host is passed on only when all is there, or memory is short:
            the save is staged sooner, since the stages after this one take no processors from the copies,
            and written later.
        one_thread_below_bytes: The budget below which a single thread makes all copies: they take less
            memory and more time. 0 if nothing is copied that jax allocates.
    """

    copies_first: bool = False
    one_thread_below_bytes: int = TIGHT

    messages: ClassVar[Messages] = {LeafBatch: StagedBatch}
    advice: ClassVar[Advice] = Advice(
        busy=(
            'Copies to the host take that long: `staging="overlap"` lets the program go on '
            "meanwhile, until it awaits `save.staged()`."
        ),
        memory_wait=(
            "Raise `[memory] limit_bytes` (the argument `memory_limit`), or "
            "`save_device_host_concurrent_bytes` if that is lower."
        ),
    )

    @asynccontextmanager
    async def open(self, run: SaveRun, /) -> AsyncGenerator[Actor]:
        """Yield the actor of one save."""
        # Under a tight budget one thread makes all copies: what jax allocates for a moment stays in the
        # pool of each thread that copies, 120 MiB in all; with one thread 72.
        if run.memory.limit >= self.one_thread_below_bytes:
            yield _Stager(run, run.threads, copies_first=self.copies_first).stage
            return

        memory = UsedMemory(run.memory.limit, huge_pages=True)
        async with one_thread(at_end=give_back_freed_memory) as thread:
            try:
                yield _Stager(run, thread, memory, copies_first=self.copies_first).stage
            finally:
                memory.clear()


@final
class _Stager:
    def __init__(
        self,
        run: SaveRun,
        thread: Threads | OneThread,
        memory: UsedMemory | None = None,
        *,
        copies_first: bool = False,
    ) -> None:
        self._run = run
        self._copies_first = copies_first
        self._thread = thread  #: makes the copies
        self._memory = memory  #: that they move into, under a tight budget
        self._most = run.limits.piece_bytes

    async def stage(self, batch: LeafBatch, /) -> AsyncIterator[StagedBatch]:
        threads, prioritised, plan = self._run.threads, batch.prioritised, batch.plan
        if not batch.leaves:
            yield StagedBatch(plan=plan)
            return
        if batch.handler is not None:
            if plan is not None and plan.joint is not None:
                from penstock.stages.agree import agree_on_plan  # needed by several processes only

                await agree_on_plan(self._run, plan)  # it begins to write at once, so there must be a place

            for folder, leaves in by_folder(self._run, batch.leaves):
                staged = await self._stage_by_handler(leaves, batch.handler, folder, prioritised=prioritised)
                yield replace(staged, plan=plan)

            return

        columns = in_columns(batch.leaves)
        if not columns.are_described:
            await threads.run(_check_changed, batch.leaves)

        room = OutputRoom(plan)
        # A message, a buffer and a checksum for each of 10,000 small leaves cost more than their bytes.
        small, rest = self._divide(columns, room)
        groups: Iterator[_Group] = _packs(columns.part(small), room, self._most)
        if rest:
            # In one trip to a thread at most: while others write, each trip waits for a processor.
            large = columns.part(rest)
            call = threads.run_briefly if _are_computed(large) else threads.run
            groups = itertools.chain(groups, await call(plan_pieces, large, self._most, room))
            del large

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
                # Of an array of several processes only their plan says whether all of it is written here.
                is_odd = None if spec.replicas.is_global and not room.divides else self._packed(spec, handler)
                chosen = known[kind] = rest if is_odd is None else odd if is_odd else even

            chosen.append(number)

        if room.changes_any or room.divides:
            alone = {at for at in (*even, *odd) if room.goes_alone(leaves.indices[at], leaves.specs[at])}
            rest = sorted([*rest, *alone])
            even, odd = ([at for at in chosen if at not in alone] for chosen in (even, odd))

        return [*even, *odd], rest

    def _packed(self, spec: LeafSpec, handler: LeafHandler) -> bool | None:
        """True if a leaf is packed, and then not of whole cache lines; None if it goes alone."""
        at, nbytes = self._run.store.placement, spec.nbytes
        is_odd = bool(nbytes % at.line_bytes)
        if not nbytes or spec.codec is not None or spec.chunk_nbytes > PACKED_BELOW:
            return None
        if nbytes > min(PACKED_TOGETHER_BELOW, self._most) or (is_odd and nbytes >= at.page_bytes):
            return None

        return is_odd if isinstance(handler, BufferHandler) else None

    async def _stage_groups(
        self, groups: Iterator[_Group], *, prioritised: bool
    ) -> AsyncGenerator[StagedBatch]:
        """Copy one group after another; the copies of the next begin first, if there is room for them.

        So devices do not wait while a group is leased, taken and passed on.
        """
        lease: ByteLease | None = None
        begun = False
        held: list[StagedBatch] = []  # see `copies_first`
        group = next(groups, None)
        try:
            while group is not None:
                if group.cost and not begun:
                    # Without a turn of the loop where there is room: a turn takes 0.1 ms while threads move
                    # memory.
                    lease = self._run.memory.acquire_nowait(group.cost, flow=self._run.flow)
                    if lease is None:
                        while held:
                            yield held.pop(0)  # it is released when it is written

                        lease = await self._run.lease(group.cost, group.key_path, prioritised=prioritised)

                following = next(groups, None)
                if group.is_plain_copy and self._memory is None:
                    copied, following = await self._copy_several(group, lease, following, groups)
                    held += copied
                    while held and not self._copies_first:
                        yield held.pop(0)

                    group, lease, begun = following, None, False
                    continue

                with releasing(self._lease_ahead(None if group.is_there else following)) as ahead:
                    with releasing(lease):
                        if group.is_there:
                            staged = group.staged()
                        else:
                            after = None if ahead is None else following
                            staged = await self._thread.run(stage_group, group, begun, after, self._memory)

                    held.append(replace(staged, staged=lease))
                    if not self._copies_first or group.can_begin:  # what devices copy takes no processor
                        while held:
                            yield held.pop(0)

                group, lease, begun = following, ahead, ahead is not None

            while held:
                yield held.pop(0)
        except BaseException:
            for staged in held:
                staged.release()

            raise

    async def _copy_several(
        self, first: _Group, lease: ByteLease | None, following: _Group | None, groups: Iterator[_Group]
    ) -> tuple[list[StagedBatch], _Group | None]:
        """Copy a group and those after it, as many as there is room for; return them, and the next one."""
        chosen = [(first, lease)]
        with ExitStack() as leases:
            leases.enter_context(releasing(lease))
            while following is not None and following.is_plain_copy and len(chosen) < AT_ONCE:
                lease = self._run.memory.acquire_nowait(following.cost, flow=self._run.flow)
                if lease is None:
                    break

                leases.enter_context(releasing(lease))
                chosen.append((following, lease))
                following = next(groups, None)

            # In as many threads: one alone does not fill the way to memory.
            run = self._thread.run
            copied = await together([partial(run, stage_group, group, False, None) for group, _ in chosen])

        leased = zip(copied, chosen, strict=True)
        return [replace(batch, staged=lease) for batch, (_, lease) in leased], following

    def _lease_ahead(self, group: _Group | None) -> ByteLease | None:
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
    """Refuse leaves whose value a stage changed without the spec, or the spec without the value."""
    for leaf in leaves:
        handler, spec = leaf.handler, leaf.spec
        if spec.shape is None:
            continue

        (found,) = handler.describe([leaf.value], [leaf.info], {})
        # It casts to the requested dtype.
        follows = isinstance(handler, ChunkingHandler) and handler.follows_spec
        if found.shape != spec.shape or (found.dtype != spec.dtype and not follows):
            raise ChangedLeafError(leaf.info.key_path, described(spec), described(found))


def _gather(leaves: Leaves) -> Extents:
    """Copy the chunks of small leaves into one buffer, one after another. In a worker thread."""
    try:
        buffers = _buffers(leaves)
        kinds = {each.dtype if type(each) is np.ndarray else None for each in buffers}
        if len(kinds) > 1 or None in kinds:
            data = memoryview(b"".join(buffers))
        else:
            # An array that was asked for its buffer remembers 56 bytes about it for as long as it lives. To
            # join arrays of one dtype as arrays does without, and is as fast.
            data = np.concatenate(buffers, axis=None).view(np.uint8).data
    except Exception:  # one by one, to find out which leaf failed, and why
        data = memoryview(b"".join([_copied([leaf])[0] for leaf in leaves]))

    return Extents(leaves.without_values(), data, len(data))


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
        found = cast("BufferHandler", handler).chunk_buffers([values[number] for number in numbers], spec)
        for number, buffer in zip(numbers, found, strict=True):
            buffers[number] = buffer

    absent = [number for number, buffer in enumerate(buffers) if buffer is None]
    if absent:
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


VIEWS_TOGETHER: Final = 4
"""How many times the bytes of a copied group may be in one of views, whose output alone is leased."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """One piece of a leaf."""

    leaf: Leaf  #: without its value
    plan: PiecePlan | None  #: None if the leaf has no pieces
    is_last: bool  #: whether it is the last one of the leaf
    view: memoryview | None = None  #: its bytes, where they cost nothing and only their output is leased
    room: int = 0  #: bytes of its output, where `encode` leases them


@final
@dataclass(frozen=True, slots=True, eq=False)
class PieceGroup:
    """Pieces that are leased and copied together, in order."""

    planned: tuple[_Planned, ...]

    @property
    def cost(self) -> int:
        """Host bytes that the copies take, and the output of later stages."""
        return sum([one.plan.cost for one in self.planned if one.plan is not None])

    @property
    def is_there(self) -> bool:
        """True if `staged` waits for nothing and copies nothing."""
        return all(one.plan is None or one.view is not None for one in self.planned)

    @property
    def key_path(self) -> str:
        """The key path of the first leaf."""
        return self.planned[0].leaf.info.key_path

    @property
    def can_begin(self) -> bool:
        """True if anything is gained by beginning early."""
        return any(one.plan is not None and one.plan.begin is not None for one in self.planned)

    @property
    def is_plain_copy(self) -> bool:
        """True if the processors copy it, in memory."""
        return not (self.is_there or self.can_begin)

    def begin(self) -> None:
        """Start the copies that devices make. Returns at once; called once `cost` is leased."""
        for one in self.planned:
            if one.plan is not None and one.plan.begin is not None:
                one.plan.begin()

    def staged(self, memory: UsedMemory | None = None) -> StagedBatch:
        """Wait for the copies, or make them. Blocking.

        Args:
            memory: That copies move into.
        """
        ended = tuple([one.leaf for one in self.planned if one.is_last])
        pieces = [_extent(one, one.plan, memory) for one in self.planned if one.plan is not None]
        return StagedBatch(ended, tuple(pieces))


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Pack:
    """Small leaves that are copied into one buffer. Its lease ends when the last of its bytes is written."""

    small: Leaves
    cost: int  #: as that of a `PieceGroup`
    is_there: ClassVar[bool] = False
    can_begin: ClassVar[bool] = False
    is_plain_copy: ClassVar[bool] = False  # most of its time needs the interpreter

    @property
    def key_path(self) -> str:
        """The key path of the first leaf."""
        return self.small.infos[self.small.indices[0]].key_path

    def begin(self) -> None:
        """Do nothing: no device copies them."""

    def staged(self, memory: UsedMemory | None = None) -> StagedBatch:
        """Copy them. Blocking."""
        extents = _gather(self.small)
        return StagedBatch(extents.leaves, (extents,))


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """Leaves that needed no lease, and are on the host."""

    batch: StagedBatch
    cost: ClassVar[int] = 0
    is_there: ClassVar[bool] = True
    can_begin: ClassVar[bool] = False
    is_plain_copy: ClassVar[bool] = False
    key_path: ClassVar[str] = ""

    def begin(self) -> None:
        """Do nothing."""

    def staged(self, memory: UsedMemory | None = None) -> StagedBatch:
        """Return them."""
        return self.batch


_Group: TypeAlias = PieceGroup | _Pack | _Taken
"""Leaves, or pieces of them, that are leased and staged together."""


def stage_group(
    group: _Group, begun: bool, ahead: _Group | None, memory: UsedMemory | None = None
) -> StagedBatch:
    """Stage a group, in a worker thread. Before it waits, it begins the copies of the group ahead."""
    if not begun:
        group.begin()
    if ahead is not None:
        ahead.begin()

    return group.staged(memory)


def _are_computed(leaves: Leaves) -> bool:
    """True if no value is still being computed, for which `plan_pieces` may wait."""
    with suppress(Exception):  # what is wrong with a value is said where it is planned
        return all(_is_ready(value) for value in leaves.values or ())

    return False


def _is_ready(value: Any) -> bool:
    if not hasattr(value, "is_ready"):
        return True

    return not value.is_deleted() and value.is_ready()  # or else the process would end (jaxlib 0.10)


def _packs(leaves: Leaves, room: OutputRoom, most: int) -> Iterator[_Pack]:
    """Yield small leaves in packs of at most `most` bytes."""
    for start, stop in cuts(leaves.sizes, most):
        small = leaves[start:stop]
        cost = sum(small.sizes)
        if room.changes_any:
            cost += sum(map(room.of, small.indices, small.specs))

        yield _Pack(small, cost)


def piece_groups(planned: Iterable[_Planned], piece_bytes: int) -> Iterator[PieceGroup]:
    """Yield groups of at most `piece_bytes`, or of one piece; pieces without cost weigh nothing.

    Of pieces that are there already there are more in a group: each message takes a turn of the loop.
    """
    group: list[_Planned] = []
    total = 0
    for entry in planned:
        cost = entry.room + (entry.plan.cost if entry.plan is not None else 0)
        most = piece_bytes if entry.view is None else piece_bytes * VIEWS_TOGETHER
        if group and cost and total + cost > most:
            yield PieceGroup(tuple(group))
            group, total = [], 0

        group.append(entry)
        total += cost

    if group:
        yield PieceGroup(tuple(group))


def plan_pieces(leaves: Leaves, piece_bytes: int, room: OutputRoom) -> Iterator[_Group]:
    """Ask each handler for its pieces. In a worker thread: it may wait for a computation to end.

    What costs nothing is taken at once, here.

    Returns:
        The leaves that need no lease, and then groups of what is to be leased: first by `encode`, which takes
        them as they are, and then here.
    """
    free: list[_Planned] = []
    views: list[_Planned] = []
    planned: list[_Planned] = []
    for leaf in leaves:
        plans = list(_pieces(leaf, piece_bytes, room))
        staged = leaf.without_value()
        later = False
        if not any(plan.cost or room_needed for plan, room_needed in plans):
            chosen = free
        else:
            later = room.is_of_encode(leaf.index, leaf.spec) and not any(plan.cost for plan, _ in plans)
            chosen = views if later else planned
        for at, (plan, room_needed) in enumerate(plans, start=1):
            view = plan.take() if room_needed and not plan.cost else None
            if later:
                chosen.append(_Planned(staged, plan, at == len(plans), view, room_needed))
                continue

            both = replace(plan, cost=plan.cost + room_needed) if room_needed else plan
            chosen.append(_Planned(staged, both, at == len(plans), view))

        if not plans:
            chosen.append(_Planned(staged, None, is_last=True))

    groups = itertools.chain(piece_groups(views, piece_bytes), piece_groups(planned, piece_bytes))
    if not free:
        return groups

    taken = PieceGroup(tuple(free))
    taken.begin()
    return itertools.chain([_Taken(taken.staged())], groups)


@final
class OutputRoom:
    """Bytes for the output of later stages, leased together with those of the leaf."""

    __slots__ = ("_plan", "_planned", "changes_any", "divides")

    def __init__(self, plan: SavePlan | None) -> None:
        self._planned = plan
        self._plan = None if plan is None or not plan.changes else plan
        self.changes_any = self._plan is not None  #: whether a later stage changes any leaf
        self.divides = plan is not None and plan.joint is not None  #: whether other processes write parts

    def absent_of(self, index: int, piece: PiecePlan) -> Iterable[PiecePlan]:
        """Return what is not written yet of a piece: all of it, unless the save goes on with another one."""
        course = None if self._planned is None else self._planned.course
        if course is None or index not in course.done:
            return (piece,)

        return _gaps(piece, course.done[index].get(piece.chunk, ()))

    def goes_alone(self, index: int, spec: LeafSpec) -> bool:
        """True if a leaf cannot be packed: a stage encodes it, or this process writes only a part of it."""
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

    def is_of_encode(self, index: int, spec: LeafSpec) -> bool:
        """True if the stage `encode` makes the only output of a leaf, and leases room for it itself.

        It does for what is on the host and needs no copy: the save is staged as soon as that is looked at,
        however small the budget is.
        """
        return spec.codec is not None and (self._plan is None or index not in self._plan.changes)

    def is_coded(self, index: int, spec: LeafSpec) -> bool:
        """True if a leaf has a codec or gets one in a later stage: then its chunks travel whole."""
        if spec.codec is not None or self._plan is None:
            return spec.codec is not None

        return self._plan.specs[index].codec is not None


def _pieces(leaf: Leaf, piece_bytes: int, room: OutputRoom) -> Iterator[tuple[PiecePlan, int]]:
    """Plan the pieces of a leaf, each with the bytes of its output in later stages.

    A chunk with a codec is one piece, and what is copied of it is leased together with its output. If
    encoding waited for room, staged pieces after it could hold the whole budget: a deadlock.
    """
    spec = leaf.spec
    if not room.is_coded(leaf.index, spec):
        for piece in leaf.handler.pieces(leaf, piece_bytes):
            for plan in room.absent_of(leaf.index, piece):
                yield plan, room.of(leaf.index, spec, plan.nbytes)

        return

    whole = leaf.handler.pieces(leaf, max(piece_bytes, spec.chunk_nbytes))
    for plan in (absent for piece in whole for absent in room.absent_of(leaf.index, piece)):
        encoded = 0 if spec.codec is None else encoding_room(plan.nbytes)
        yield plan, encoded + room.of(leaf.index, spec, plan.nbytes)


def _gaps(piece: PiecePlan, done: Iterable[tuple[int, int]]) -> Iterator[PiecePlan]:
    """Yield the parts of a piece that are in none of the ranges `done`, which are in order."""
    at, end = piece.start, piece.start + piece.nbytes
    for start, stop in (*done, (end, end)):
        if at < min(start, end):
            yield _part_of(piece, at, min(start, end))

        at = max(at, stop)


def _part_of(piece: PiecePlan, start: int, stop: int) -> PiecePlan:
    if (start, stop) == (piece.start, piece.start + piece.nbytes):
        return piece

    def take() -> memoryview:
        return piece.take()[start - piece.start : stop - piece.start]

    return replace(piece, start=start, nbytes=stop - start, take=take)


def _extent(planned: _Planned, plan: PiecePlan, memory: UsedMemory | None) -> Extents:
    data = planned.view
    if data is None:
        data = plan.take()
        if memory is not None and plan.cost:
            data = moved(data, memory)

    return Extents((planned.leaf,), data, plan.cost, plan.chunk, plan.start)


def moved(data: memoryview, memory: UsedMemory) -> memoryview:
    """Return the same bytes in some memory, unless they are few, or in a mapping of their own. Blocking."""
    if len(data) < MAPPED_FROM or is_mapped(data):
        return data

    found = memory.take(len(data))
    np.copyto(np.frombuffer(found, np.uint8), np.frombuffer(data, np.uint8))  # others run meanwhile
    return found
