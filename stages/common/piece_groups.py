"""How leaves are copied to the host: their pieces, in groups that are leased and copied together."""

from __future__ import annotations

__all__ = ("OutputRoom", "PieceGroup", "piece_groups", "plan_pieces", "take_pieces")

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, final

from penstock.kernel.memory.buffers import in_memory_of_its_own
from penstock.kernel.messages.leaves import Leaf, Leaves
from penstock.kernel.messages.save import Piece, SavePlan, StagedBatch
from penstock.kernel.protocols.leaf import LeafSpec
from penstock.kernel.protocols.written import PiecePlan
from penstock.stages.common.codec_rules import encoding_room

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
        """Whether `take` waits for nothing and copies nothing."""
        return all(one.plan is None or one.view is not None for one in self.planned)

    @property
    def key_path(self) -> str:
        """Of the first leaf."""
        return self.planned[0].leaf.info.key_path

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Those whose last piece is here."""
        return tuple([one.leaf for one in self.planned if one.is_last])

    @property
    def can_begin(self) -> bool:
        """Whether anything is gained by beginning early."""
        return any(one.plan is not None and one.plan.begin is not None for one in self.planned)

    def begin(self) -> None:
        """Start the copies that devices make. Returns at once; called once `cost` is leased."""
        for one in self.planned:
            if one.plan is not None and one.plan.begin is not None:
                one.plan.begin()

    def take(self, tight: bool = False) -> tuple[Piece, ...]:
        """Wait for the copies, or make them. Blocking.

        Args:
            tight: Whether copies move into memory that returns to the system when freed.
        """
        return tuple([_piece(one, one.plan, tight) for one in self.planned if one.plan is not None])


def take_pieces(group: PieceGroup, begun: bool, ahead: PieceGroup | None, tight: bool) -> tuple[Piece, ...]:
    """Take the pieces of a group, in a worker thread. Before it waits, it begins those of the group ahead."""
    if not begun:
        group.begin()
    if ahead is not None:
        ahead.begin()

    return group.take(tight)


def piece_groups(planned: Iterable[_Planned], piece_bytes: int) -> Iterator[PieceGroup]:
    """Yield groups of at most `piece_bytes`, or of one piece; pieces without cost weigh nothing.

    Of pieces that are there already there are more in a group: each message takes a turn of the loop.
    """
    group: list[_Planned] = []
    total = 0
    for entry in planned:
        cost = entry.plan.cost if entry.plan is not None else 0
        most = piece_bytes if entry.view is None else piece_bytes * VIEWS_TOGETHER
        if group and cost and total + cost > most:
            yield PieceGroup(tuple(group))
            group, total = [], 0

        group.append(entry)
        total += cost

    if group:
        yield PieceGroup(tuple(group))


def plan_pieces(
    leaves: Leaves, piece_bytes: int, room: OutputRoom
) -> tuple[StagedBatch | None, list[_Planned]]:
    """Ask each handler for its pieces. In a worker thread: it may wait for a computation to end.

    What costs nothing is taken at once, here.

    Returns:
        The pieces of the leaves that need no lease, and what is to be leased.
    """
    free: list[_Planned] = []
    planned: list[_Planned] = []
    for leaf in leaves:
        plans = list(_pieces(leaf, piece_bytes, room))
        staged = leaf.without_value()
        chosen = planned if any(plan.cost or room_needed for plan, room_needed in plans) else free
        for at, (plan, room_needed) in enumerate(plans, start=1):
            view = plan.take() if room_needed and not plan.cost else None
            both = replace(plan, cost=plan.cost + room_needed) if room_needed else plan
            chosen.append(_Planned(staged, both, at == len(plans), view))

        if not plans:
            chosen.append(_Planned(staged, None, is_last=True))

    if not free:
        return None, planned

    taken = PieceGroup(tuple(free))
    taken.begin()
    return StagedBatch(taken.leaves, taken.take()), planned


@final
class OutputRoom:
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


def _pieces(leaf: Leaf, piece_bytes: int, room: OutputRoom) -> Iterator[tuple[PiecePlan, int]]:
    """Plan the pieces of a leaf, each with the bytes of its output in later stages.

    A chunk with a codec is one piece, leased together with its output. If encoding leased its own bytes,
    staged pieces behind it could hold the whole budget: a deadlock.
    """
    spec = leaf.spec
    if not room.is_coded(leaf.index, spec):
        for plan in leaf.handler.pieces(leaf, piece_bytes):
            yield plan, room.of(leaf.index, spec, plan.nbytes)

        return

    for plan in leaf.handler.pieces(leaf, max(piece_bytes, spec.chunk_nbytes)):
        encoded = 0 if spec.codec is None else encoding_room(plan.nbytes)
        yield plan, encoded + room.of(leaf.index, spec, plan.nbytes)


def _piece(planned: _Planned, plan: PiecePlan, tight: bool) -> Piece:
    data = planned.view
    if data is None:
        data = plan.take()
        if tight and plan.cost:
            data = in_memory_of_its_own(data)

    return Piece(planned.leaf, plan.chunk, plan.start, data, plan.cost)
